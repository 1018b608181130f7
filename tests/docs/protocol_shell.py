"""A reader's shell for docs/PROTOCOL.md and examples/stubs/README.md, next to the manager that the document starts."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.blocks import ROOT, here
from tests.docs.programs import run_in_shell

DOCUMENT = ROOT / "docs" / "PROTOCOL.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
STUBS = (ROOT / "examples" / "stubs" / "README.md").read_text(encoding="utf-8")
FENCED = re.MULTILINE | re.DOTALL


def section(title: str, text: str = TEXT) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    (level,) = re.findall(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    return re.split(rf"^#{{1,{len(level)}}} ", text.split(f"{level} {title}\n")[1], flags=re.MULTILINE)[0]


class ProtocolShell:
    """Runs commands of the documents with this port, this environment's programs, and a folder in place of build/stubs."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port = port
        self._folder = folder

    def here(self, text: str) -> str:
        """A command as it can be run here."""
        text = text.replace("$PWD/build/stubs", "build/stubs").replace("build/stubs", str(self._folder))
        return here(text.replace("50061", str(self.port)))

    def run(self, commands: str) -> str:
        """Run commands, of which the last must succeed; returns what they print."""
        return run_in_shell(self.here(commands))

    def commands(self, language: str) -> tuple[str, str]:
        """The commands that compile the stubs of a language and call the manager, and the output shown for them."""
        shared, own = STUBS.split("\n## ")[0], section(language, STUBS)
        found = [re.findall(r"^```sh\n(.*?)^```$", text, FENCED) for text in (shared, own)]
        (printed,) = re.findall(r"^```text\n(.*?)^```$", own, FENCED)
        return "".join(["set -e\n", *found[0], *found[1]]), printed
