"""`python -m kvpool.gateway`: run a gateway until SIGTERM or SIGINT."""

from __future__ import annotations

import kvpool.process.quiet_start  # before asyncio, whose import takes long enough for a Ctrl-C

# isort: split
import asyncio
import signal
import sys

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.address import PortError
from kvpool.process.logs import configure_logging, identify_log_lines
from kvpool.process.settings import SettingsProblem, load_settings
from kvpool.process.signals import exit_status

from .settings import GatewaySettings

EXIT_FAILED = 1
EXIT_USAGE = 2


def main() -> int:
    """Run the gateway; returns the exit status: 0 after SIGTERM, 130 after SIGINT, 1 if it could not start or continue, 2 for wrong
    settings."""
    try:
        settings = load_settings(GatewaySettings)
    except SettingsProblem as problem:
        for line in str(problem).splitlines():
            _complain(line)
        return EXIT_USAGE
    configure_logging(settings.log_format, settings.log_level)
    identify_log_lines(service="gateway")
    try:
        return asyncio.run(_serve(settings))
    except PortError as error:
        _complain(str(error))
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "httptools"):
            raise
        _complain(f"{error.name} is not installed: the gateway needs an extra, pip install 'kvpool[gateway]'")
        return EXIT_FAILED


async def _serve(settings: GatewaySettings) -> int:
    """Serve until a signal asks to stop; returns the exit status. Raises PortError. A second signal ends the process at once."""
    from .server import GatewayServer  # not before the settings are known to be right, and the extra may be missing

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
    async with GatewayServer(settings) as server:
        await server.serve_until(stopping)
        for number in signals:
            loop.remove_signal_handler(number)
    return status


def _complain(message: str) -> None:
    print(f"kvpool gateway: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
