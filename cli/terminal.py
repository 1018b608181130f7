"""The terminal side of all commands: consoles, common options, JSON, errors, and texts of other processes."""

from __future__ import annotations

import codecs
import io
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from kvpool.client.config import MANAGER_VARIABLE, ClientConfig
from kvpool.client.errors import KvpoolError
from kvpool.process.address import DEFAULT_MANAGER, is_loopback, manager_addresses
from kvpool.process.printable import printable, printable_lines
from kvpool.process.settings import load_settings

from .settings import ClientSettings

PIPED_WIDTH: Final = 120
_FIRST_CONTACT_SECONDS: Final = 1.0
_IN_ASCII: Final = {
    "∅": "0", "·": ".", "▒": "%", "█": "=", "…": ".", "–": "-", "−": "-", "×": "x", "⌈": "[", "⌉": "]", "→": ">", "←": "<",
    "↑": "^", "↓": "v",
}  # fmt: skip
"""Replacements for signs in tables and pictures if the encoding has only ASCII. Each is one column wide, and those of the block map
are distinct."""

ManagerOption = Annotated[
    str | None,
    typer.Option(
        "--manager",
        envvar=MANAGER_VARIABLE,
        help="host:port of the cache manager; of several with commas between; or file:PATH of a file that lists them.",
        show_default=DEFAULT_MANAGER,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def client_config(manager: str | None) -> ClientConfig:
    """Return the client's settings for one command, with a short time for the first contact with the manager.

    Warns on stderr if the manager is on another machine; call it once per command.
    """
    settings = load_settings(ClientSettings, []).model_dump(exclude={"config"})
    if manager:
        settings["manager"] = manager
    config = ClientConfig(**settings, first_contact=_FIRST_CONTACT_SECONDS)
    if not all(is_loopback(address.rpartition(":")[0]) for address in manager_addresses(config.manager)):
        print(
            f"kvpool: the connection to {config.manager} is not encrypted; use it only on a network that you trust",
            file=sys.stderr,
        )
    return config


def print_json(value: object) -> None:
    """Print one JSON object on one line, in ASCII."""
    print(json.dumps(value))


def replace_what_cannot_be_encoded() -> None:
    """Let stdout and stderr replace signs that their encoding lacks (PYTHONIOENCODING=ascii, LC_ALL=C)."""
    codecs.register_error("kvpool", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="kvpool")


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_IN_ASCII.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


def typed_command() -> str:
    """Return the command to type in this folder to run `kvpool` of this installation."""
    program = Path(sys.executable).with_name("kvpool")
    if not program.is_file():
        return f"{shlex.quote(sys.executable)} -m kvpool.cli"
    on_path = shutil.which("kvpool")
    if on_path is not None and program.samefile(on_path):
        return "kvpool"
    with_folder = program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program
    return shlex.quote(str(with_folder))


def stdout_console() -> Console:
    """Make a console for results. A pipe gets a fixed width, so that tables are not cut to 80 columns."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """Make a console for progress and remarks that are not part of the result."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return _PipeConsole(stderr=stderr, width=width, highlight=False)


class _PipeConsole(Console):
    """Raises BrokenPipeError when the reader of the output has left (| head): rich's SystemExit would break the event loop."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise BrokenPipeError


def printed(text: str) -> Text:
    """Wrap a text with names of other processes for tables and progress lines: in a plain string rich would look for markup."""
    return Text(printable(text))


def print_answer(text: str) -> None:
    """Print a piece of a model's answer as it comes. Piped, the text is unchanged; on a terminal control characters are escaped,
    because a prompt may make a model write them."""
    print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)


def error_line(error: KvpoolError) -> str:
    """Return the error as one line, with what to change."""
    line = f"kvpool: {error}"
    # A message about one field is often equal to the violation of that field.
    others = [violation for violation in error.violations if violation.partition(": ")[2] not in line]
    if others:
        line += f" ({'; '.join(others)})"
    if error.retry_after is not None:
        line += f" [try again in {error.retry_after:g} s]"
    return " ".join(line.split())
