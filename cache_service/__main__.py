"""`python -m kvpool.cache_service`: run a cache manager until SIGTERM or SIGINT."""

from __future__ import annotations

import kvpool.process.quiet_start  # before asyncio, whose import takes long enough for a Ctrl-C

# isort: split
import asyncio
import gc
import sys

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.address import PortError
from kvpool.process.logs import configure_logging
from kvpool.process.program import run_service, serve_until_signal

from .election.choice import choose_store
from .election.epoch import LeadershipLost, StateError
from .server import ManagerServer
from .settings import ManagerSettings


def main() -> int:
    """Run the manager; returns the exit status: 0 after SIGTERM, 130 after SIGINT, 1 if it could not start or continue, 2 for wrong
    settings."""
    return run_service("manager", ManagerSettings, _run, (PortError, StateError, LeadershipLost))


def _run(settings: ManagerSettings) -> int:
    configure_logging(settings.log_format, settings.log_level)
    epochs = choose_store(settings)
    return asyncio.run(serve_until_signal(lambda: ManagerServer(settings, epochs), _switch_off_the_collector))


def _switch_off_the_collector() -> None:
    """Switch off automatic garbage collection, so that nothing walks the prefix tree to look for cycles.

    A pass over half a million nodes stops every call for 300 ms, and finds nothing: the core makes no cycles that it does not
    break. The imported objects are frozen, so the young passes that the server makes for gRPC's sake skip them. Looking for the
    few cycles among them would take 20 ms, while streams may be waiting for this start.
    """
    gc.freeze()
    gc.disable()


if __name__ == "__main__":
    sys.exit(main())
