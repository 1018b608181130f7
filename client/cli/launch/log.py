"""One log out of many: every line with the name of the process that wrote it."""

from __future__ import annotations

import re
from typing import Final

from rich.console import Console
from rich.text import Text

from kvpool.process.printable import printable_lines

_COLOUR: Final = re.compile("(\x1b\\[[0-9;]*m)")
_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


class PrefixedLog:
    """Prints lines as `worker-0 | line`, each process in its colour. Names may come at any time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """Print one line. Colours in it are kept where the console has any; every other control character is shown."""
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        parts = _COLOUR.split(line)
        # Between the parts are the colours themselves. Only they are left for rich to read: it takes links too.
        parts[::2] = [printable_lines(part) for part in parts[::2]]
        text = Text.from_ansi("".join(parts))
        self._console.print(Text.assemble((f"{name:<9}| ", style), text), soft_wrap=True)
