"""`python -m kvpool.cache_service`: run a cache manager until SIGTERM or SIGINT."""

from __future__ import annotations

import kvpool.process.quiet_start  # before asyncio, whose import takes long enough for a Ctrl-C

# isort: split
import asyncio
import gc
import signal
import sys

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.address import PortError
from kvpool.process.logs import configure_logging, identify_log_lines
from kvpool.process.settings import SettingsProblem, load_settings
from kvpool.process.signals import exit_status

from .election.choice import choose_store
from .election.epoch import EpochStore, LeadershipLost, StateError
from .server import ManagerServer
from .settings import ManagerSettings

EXIT_FAILED = 1
EXIT_USAGE = 2


def main() -> int:
    """Run the manager; returns the exit status: 0 after SIGTERM, 130 after SIGINT, 1 if it could not start or continue, 2 for wrong
    settings."""
    try:
        settings = load_settings(ManagerSettings)
    except SettingsProblem as problem:
        for line in str(problem).splitlines():
            _complain(line)
        return EXIT_USAGE
    configure_logging(settings.log_format, settings.log_level)
    identify_log_lines(service="manager")
    try:
        return asyncio.run(_serve(settings, choose_store(settings)))
    except (PortError, StateError, LeadershipLost) as error:
        _complain(str(error))
        return EXIT_FAILED


async def _serve(settings: ManagerSettings, epochs: EpochStore) -> int:
    """Serve until a signal asks to stop; returns the exit status. A second signal ends the process at once.

    Raises PortError, StateError, LeadershipLost.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    status = 0

    def stop(number: int) -> None:
        nonlocal status
        status = exit_status(number)
        stopping.set()

    for number in signals:
        loop.add_signal_handler(number, stop, number)
    async with ManagerServer(settings, epochs) as server:
        _switch_off_the_collector()
        await server.serve_until(stopping)
        for number in signals:
            loop.remove_signal_handler(number)
    return status


def _switch_off_the_collector() -> None:
    """Switch off automatic garbage collection, so that nothing walks the prefix tree to look for cycles.

    A pass over half a million nodes stops every call for 300 ms, and finds nothing: the core makes no cycles that it does not
    break. The imported objects are frozen, so the young passes that the server makes for gRPC's sake skip them. Looking for the
    few cycles among them would take 20 ms, while streams may be waiting for this start.
    """
    gc.freeze()
    gc.disable()


def _complain(message: str) -> None:
    print(f"kvpool manager: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
