"""Commands that pass their arguments on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from kvpool.process.services import SERVICES, become, service_command


class PassThrough(TyperCommand):
    """A command that parses all its arguments itself, even --help and `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args


def service(name: str) -> Callable[[typer.Context], None]:
    """Return the command that makes this process the service, with all arguments. The program `kvpool` does so before it imports
    this module, which is for `python -m kvpool.cli`."""

    def run(context: typer.Context) -> None:
        become(service_command(SERVICES[name], context.args))

    return run
