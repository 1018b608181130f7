"""The program `kvpool`. It is outside of `kvpool.client`, whose import takes half a second in which Ctrl-C may come."""

from __future__ import annotations

import kvpool.process.quiet_start  # noqa: F401

# isort: split
import sys

from kvpool.process.imports import without_collections
from kvpool.process.services import SERVICES, become, service_command
from kvpool.process.signals import exit_in_order

__all__ = ["main"]


def main() -> None:
    """Run one command and exit; the command of a service replaces this process with it."""
    name, *arguments = sys.argv[1:] or [""]
    if name in SERVICES:
        become(service_command(SERVICES[name], arguments))
    with without_collections():
        from kvpool.cli.app import main as run
    exit_in_order()
    run()
