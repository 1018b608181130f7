"""`kvpool walkthrough`: the manager's core, one operation at a time, in place of this process."""

from __future__ import annotations

import os
from typing import Final

import typer

from ..launch.services import service_command

WALKTHROUGH_MODULE: Final = "kvpool.cache_service.walkthrough"


def walkthrough(context: typer.Context) -> None:
    """See the manager's core at work, one operation at a time: allocation, prefix, chain, eviction."""
    command = service_command(WALKTHROUGH_MODULE, context.args)
    os.execv(command[0], command)
