"""Writes the log of `kvpool up`: the lines of all its processes, and its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final, Protocol, TextIO

from rich.console import Console
from rich.text import Text

from kvpool.process.printable import printable_lines

from ..terminal import printed

_COLOUR: Final = re.compile("(\x1b\\[[0-9;]*m)")
_STYLES = ("cyan", "green", "magenta", "yellow", "blue", "red")


class Level(StrEnum):
    """Kinds of `kvpool up`'s own lines."""

    info = "info"
    event = "event"
    """A process has started, ended or left."""
    error = "error"


class Log(Protocol):
    """Takes the lines of all processes."""

    def __call__(self, name: str, line: str) -> None:
        """Write a line of the process `name`."""

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        """Write a line of `kvpool up` itself; `fields` are for programs."""


class PrefixedLog:
    """Prints lines as `worker-0 | line`, each process in its colour. Names may come at any time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """Print one line. Its colours are kept if the console has any; every other control character is escaped."""
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        parts = _COLOUR.split(line)
        # Every second part is a colour. Only these are left for rich to read: it takes links too.
        parts[::2] = [printable_lines(part) for part in parts[::2]]
        text = Text.from_ansi("".join(parts))
        self._console.print(Text.assemble((f"{name:<9}| ", style), text), soft_wrap=True)

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        """Print a line without a prefix; an error goes to stderr."""
        if level is Level.error:
            print(line, file=sys.stderr)
        else:
            self._console.print(printed(line), style="bold" if level is Level.event else "", soft_wrap=True)


class JsonLog:
    """Prints each line as one JSON object. The processes write objects already, with `service` and `worker_id`; any other line,
    e.g. of a library that writes to stderr itself, is made into one."""

    def __init__(self, stream: TextIO, manager: str) -> None:
        self._stream = stream
        self._manager = manager

    def __call__(self, name: str, line: str) -> None:
        """Print a line of the process `name`."""
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            self._print(line)
        elif line.strip():
            service = {"service": "manager"} if name == self._manager else {"service": "worker", "worker_id": name}
            self._print(json.dumps({**service, "event": line, "level": "info", "timestamp": _now()}))

    def say(self, line: str, level: Level = Level.info, fields: Mapping[str, object] | None = None) -> None:
        """Print a line of `kvpool up`."""
        severity = "error" if level is Level.error else "info"
        self._print(
            json.dumps({"service": "up", **(fields or {}), "event": line, "level": severity, "timestamp": _now()})
        )

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
