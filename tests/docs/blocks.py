"""The fenced blocks of a document."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    language: str
    text: str

    def commands(self) -> list[str]:
        """The commands of a shell block; an open quote or a backslash continues a line."""
        found, command = [], ""
        for line in self.text.splitlines(keepends=True):
            command += line
            if not line.endswith("\\\n") and _is_whole(command):
                if shlex.split(command, comments=True):
                    found.append(command.strip())
                command = ""
        assert not command, f"a command does not end: {command}"
        return found


def here(command: str) -> str:
    """A command of a document with this environment's programs: a checkout's own `.venv` is wherever these tests run."""
    return command.replace(".venv/bin/", f"{Path(sys.executable).parent}/")


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def blocks(document: Path) -> list[Block]:
    """All fenced blocks, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def inline_code(document: Path) -> list[str]:
    """What stands between single backticks outside of blocks, line breaks as spaces."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]
