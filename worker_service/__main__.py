"""`python -m kvpool.worker_service`: run one worker."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog

import kvpool.process.quiet_core  # noqa: F401
from kvpool.process.logs import configure_logging
from kvpool.process.printable import printable_lines

from .cpu_share import spin_between_products
from .settings import WorkerSettings, settings_of_this_process


def main() -> None:
    """Run a worker until it is stopped, or only print its plan. Exit status 2: bad settings; 1: it could not start or
    continue."""
    settings = settings_of_this_process()
    configure_logging(settings.log_format, settings.log_level)
    if settings.model_spin:
        spin_between_products()
    try:
        from kvpool.process.address import PortError

        from .incarnation import WorkerStateError
        from .manager_link import RegistrationRefused
        from .model.errors import ModelError
        from .server import StoppedWhileLoading, run_worker
    except ModuleNotFoundError as error:
        print(
            f"kvpool worker: the package {error.name!r} is missing: a worker needs `pip install '.[worker]'` in a checkout of "
            "kvpool",
            file=sys.stderr,
        )
        sys.exit(1)
    try:
        if settings.dry_run:
            _dry_run(settings)
            return
        with asyncio.Runner() as runner:
            try:
                runner.run(run_worker(settings))
            except StoppedWhileLoading:
                # The worker holds nothing and is not registered; an orderly exit would wait for the load.
                sys.stderr.flush()
                os._exit(0)
    except (ModelError, PortError, RegistrationRefused, WorkerStateError) as error:
        # Printable: some texts come from the manager.
        print(f"kvpool worker: {printable_lines(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _dry_run(settings: WorkerSettings) -> None:
    from rich.console import Console

    from .dry_run import dry_run

    dry_run(settings, Console(), structlog.get_logger("kvpool.worker").info)


if __name__ == "__main__":
    main()
