"""What all commands share of the terminal: consoles, the options they have in common, and how errors and texts of others look."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from kvpool.process.address import DEFAULT_MANAGER, is_loopback
from kvpool.process.printable import printable, printable_lines
from kvpool.process.settings import load_settings

from ..config import MANAGER_VARIABLE, ClientConfig
from ..errors import KvpoolError
from .settings import ClientSettings

_PIPED_WIDTH: Final = 120
_FIRST_CONTACT_SECONDS: Final = 1.0

ManagerOption = Annotated[
    str | None,
    typer.Option(
        "--manager", envvar=MANAGER_VARIABLE, help="host:port of the cache manager.", show_default=DEFAULT_MANAGER
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def client_config(manager: str | None) -> ClientConfig:
    """The client's settings for one command: whoever types it does not want to wait long for a manager that is not there.

    Says so on stderr if the manager is on another machine; call it once per command.
    """
    settings = load_settings(ClientSettings, [])
    config = ClientConfig(
        manager=manager or settings.manager,
        timeout=settings.timeout,
        max_attempts=settings.max_attempts,
        continuation=settings.continuation,
        max_model_bytes=settings.max_model_bytes,
        first_contact=_FIRST_CONTACT_SECONDS,
    )
    if not is_loopback(config.manager.rpartition(":")[0]):
        print(
            f"kvpool: the connection to {config.manager} is not encrypted; use it only on a network that you trust",
            file=sys.stderr,
        )
    return config


def stdout_console() -> Console:
    """For results. Piped, it keeps a fixed width, so that tables are not cut to 80 columns."""
    return _console(stderr=False)


def stderr_console() -> Console:
    """For progress and remarks that are no part of the result."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return _PipeConsole(stderr=stderr, width=width, highlight=False)


class _PipeConsole(Console):
    """Tells a reader that has left (| head) as BrokenPipeError: rich's SystemExit would tear down the event loop."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        raise BrokenPipeError


def printed(text: str) -> Text:
    """A text in which others have a say, for tables and progress lines: in a plain string rich would look for markup."""
    return Text(printable(text))


def print_answer(text: str) -> None:
    """Print a piece of a model's answer as it comes. Piped, it is the text to the letter; a terminal is given no control
    characters, which a model may be made to write."""
    print(printable_lines(text) if sys.stdout.isatty() else text, end="", flush=True)


def error_line(error: KvpoolError) -> str:
    """One line: what was needed, what there is, what to change."""
    line = f"kvpool: {error}"
    # A message that speaks of one field says the same again in the field's own violation.
    further = [violation for violation in error.violations if violation.partition(": ")[2] not in line]
    if further:
        line += f" ({'; '.join(further)})"
    if error.retry_after is not None:
        line += f" [try again in {error.retry_after:g} s]"
    return " ".join(line.split())
