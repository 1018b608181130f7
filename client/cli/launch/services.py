"""`kvpool manager …` and `kvpool worker …`: this process becomes the service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import typer

MANAGER_MODULE: Final = "kvpool.cache_service"
WORKER_MODULE: Final = "kvpool.worker_service"


def service_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line that starts a service with this Python."""
    return [sys.executable, "-m", module, *arguments]


def manager(context: typer.Context) -> None:
    """Run a cache manager. All arguments go to it; `kvpool manager --help` lists them."""
    become(service_command(MANAGER_MODULE, context.args))


def worker(context: typer.Context) -> None:
    """Run a worker. All arguments go to it; `kvpool worker --help` lists them."""
    become(service_command(WORKER_MODULE, context.args))


def become(command: list[str]) -> NoReturn:
    """Run the command in place of this process: signals, exit status and log are then its own."""
    os.execv(command[0], command)
