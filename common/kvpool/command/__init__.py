"""The program `kvpool`. It is outside of `kvpool.client`, whose import takes half a second in which Ctrl-C may come."""

from __future__ import annotations

import kvpool.process.quiet_start  # noqa: F401
from kvpool.client.cli import main as run
from kvpool.process.signals import exit_in_order

__all__ = ["main"]


def main() -> None:
    """Run one command and exit."""
    exit_in_order()
    run()
