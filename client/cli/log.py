"""One log out of many: every line with the name of the process that wrote it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


class PrefixedLog:
    """Prints lines as `worker-0 | line`, each process in its colour. Names may come at any time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[str, str] = {}
        self.last_line = ""
        """The latest line of any process, without its prefix."""

    def __call__(self, name: str, line: str) -> None:
        """Print one line. Escape sequences in it are kept as colours where the console has any."""
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        text = Text.from_ansi(line)
        self.last_line = text.plain
        self._console.print(Text.assemble((f"{name:<9}| ", style), text), soft_wrap=True)
