"""Starts the services as processes. Imports nothing that takes time: `kvpool worker` becomes a worker at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

MANAGER_MODULE: Final = "kvpool.cache_service"
WORKER_MODULE: Final = "kvpool.worker_service"
GATEWAY_MODULE: Final = "kvpool.gateway"
WALKTHROUGH_MODULE: Final = "kvpool.walkthrough"
SERVICES: Final[Mapping[str, str]] = {
    "manager": MANAGER_MODULE,
    "worker": WORKER_MODULE,
    "gateway": GATEWAY_MODULE,
    "walkthrough": WALKTHROUGH_MODULE,
}
"""Modules that are programs of their own, by the name of their command."""


def service_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line that starts a service with this Python."""
    return [sys.executable, "-m", module, *arguments]


def become(command: list[str]) -> NoReturn:
    """Replace this process by the command, which then has its signals, exit status and log."""
    os.execv(command[0], command)
