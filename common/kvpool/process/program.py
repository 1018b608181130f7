"""What the programs of all services do alike: settings, log, signals and exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

from .logs import identify_log_lines
from .printable import printable_lines
from .settings import ProcessSettings, SettingsProblem, load_settings
from .signals import exit_status

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

S = TypeVar("S", bound=ProcessSettings)


def run_service(name: str, kind: type[S], run: Callable[[S], int], failures: tuple[type[Exception], ...] = ()) -> int:
    """Load the settings and run the service. Returns the exit status: that of `run`, 1 after one of the `failures`, which are
    reported on stderr, 2 for wrong settings."""
    try:
        settings = load_settings(kind)
    except SettingsProblem as problem:
        for line in str(problem).splitlines():
            complain(name, line)
        return EXIT_USAGE
    identify_log_lines(service=name)
    try:
        return run(settings)
    except failures as error:
        complain(name, printable_lines(str(error)))  # among them words of other processes
        return EXIT_FAILED


async def serve_until_signal(
    server: Callable[[], AbstractAsyncContextManager[Any]], on_started: Callable[[], None] = lambda: None
) -> int:
    """Make the server and let it `serve_until` a signal asks to stop; returns the exit status. A second signal ends the process at
    once."""
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
    async with server() as serving:
        on_started()
        await serving.serve_until(stopping)
        for number in signals:
            loop.remove_signal_handler(number)
    return status


def complain(name: str, message: str) -> None:
    """Write a message of the service's command to stderr."""
    print(f"kvpool {name}: {message}", file=sys.stderr)
