"""`kvpool walkthrough`: this process becomes the walkthrough, which shows the manager's core one operation at a time."""

from __future__ import annotations

from typing import Final

import typer

from kvpool.process.services import become, service_command

WALKTHROUGH_MODULE: Final = "kvpool.walkthrough"


def walkthrough(context: typer.Context) -> None:
    """See the manager's core at work, one operation at a time, in nine stories: pool, sharing, allocation, prefix, chain, eviction,
    window, state, fork."""
    become(service_command(WALKTHROUGH_MODULE, context.args))
