"""`python -m kvpool.worker_service`: run one worker."""

from __future__ import annotations

import kvpool.process.quiet_start  # before asyncio, whose import takes long enough for a Ctrl-C

# isort: split
import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.address import PortError
from kvpool.process.imports import without_collections
from kvpool.process.logs import configure_logging
from kvpool.process.printable import printable_lines
from kvpool.process.program import EXIT_FAILED, complain, run_service
from kvpool.process.signals import INTERRUPTED

from .incarnation import WorkerStateError
from .model.errors import ModelError
from .settings import WorkerSettings


def main() -> int:
    """Run a worker until it is asked to stop, or only print its plan; returns the exit status: 0 after SIGTERM or a drain, 130
    after SIGINT, 1 if it could not start or continue, 2 for wrong settings."""
    return run_service("worker", WorkerSettings, _run, (ModelError, PortError, WorkerStateError))


def _run(settings: WorkerSettings) -> int:
    configure_logging(settings.log_format, settings.log_level)
    try:
        return _dry_run(settings) if settings.dry_run else _serve(settings)
    except KeyboardInterrupt:
        return INTERRUPTED


def _serve(settings: WorkerSettings) -> int:
    with _tensor_side():
        from .manager_link import RegistrationRefused
        from .server import StoppedWhileLoading, run_worker
    with asyncio.Runner() as runner:
        try:
            return runner.run(run_worker(settings))
        except RegistrationRefused as error:
            complain("worker", printable_lines(str(error)))  # among them words of the manager
            return EXIT_FAILED
        except StoppedWhileLoading as stopped:
            # Nothing is held and the manager does not know this worker; an exit in order would wait for the load.
            sys.stderr.flush()
            os._exit(stopped.exit_status)


def _dry_run(settings: WorkerSettings) -> int:
    with _tensor_side():
        from rich.console import Console

        from .dry_run import dry_run

        dry_run(settings, Console(), structlog.get_logger("kvpool.worker").info)
    return 0


@contextmanager
def _tensor_side() -> Iterator[None]:
    """Imports what only a worker needs; exits if it is not installed."""
    try:
        with without_collections():
            yield
    except ModuleNotFoundError as error:
        missing = f"the package {error.name!r} is missing"
        complain("worker", f"{missing}: a worker needs `pip install '.[worker]'` in a checkout of kvpool")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
