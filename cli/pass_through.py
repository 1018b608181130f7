"""Commands that pass their arguments on."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PassThrough(TyperCommand):
    """A command that parses all its arguments itself, even --help and `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args
