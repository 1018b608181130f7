"""`python -m kvpool.gateway`: run a gateway until SIGTERM or SIGINT."""

from __future__ import annotations

import kvpool.process.quiet_start  # before asyncio, whose import takes long enough for a Ctrl-C

# isort: split
import asyncio
import sys

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.address import PortError
from kvpool.process.logs import configure_logging
from kvpool.process.program import EXIT_FAILED, complain, run_service, serve_until_signal

from .settings import GatewaySettings


def main() -> int:
    """Run the gateway; returns the exit status: 0 after SIGTERM, 130 after SIGINT, 1 if it could not start or continue, 2 for wrong
    settings."""
    return run_service("gateway", GatewaySettings, _run, (PortError,))


def _run(settings: GatewaySettings) -> int:
    configure_logging(settings.log_format, settings.log_level)
    try:
        from .server import GatewayServer  # not before the settings are known to be right, and the extra may be missing
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "httptools"):
            raise
        complain("gateway", f"{error.name} is not installed: the gateway needs an extra, pip install 'kvpool[gateway]'")
        return EXIT_FAILED
    return asyncio.run(serve_until_signal(lambda: GatewayServer(settings)))


if __name__ == "__main__":
    sys.exit(main())
