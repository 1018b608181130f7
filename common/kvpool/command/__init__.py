"""The program `kvpool`. It is outside of `kvpool.client`, whose import takes half a second in which Ctrl-C may come."""

from __future__ import annotations

import kvpool.process.quiet_start  # noqa: F401
from kvpool.process.imports import without_collections
from kvpool.process.signals import exit_in_order

with without_collections():
    from kvpool.client.cli.app import main as run

__all__ = ["main"]


def main() -> None:
    """Run one command and exit."""
    exit_in_order()
    run()
