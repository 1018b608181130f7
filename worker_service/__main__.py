"""`python -m kvpool.worker_service`: run one worker."""

from __future__ import annotations

import asyncio
import os
import sys

import structlog
from kvpool.process.logs import configure_logging
from kvpool.process.settings import SettingsProblem, load_settings

from .settings import WorkerSettings


def _settings() -> WorkerSettings:
    try:
        return load_settings(WorkerSettings)
    except SettingsProblem as problem:
        for line in str(problem).splitlines():
            print(f"kvpool worker: {line}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run a worker until it is told to stop, or only print its plan. Exit status 2: bad settings; 1: it could not start or
    go on."""
    settings = _settings()
    configure_logging(settings.log_format, settings.log_level)
    try:
        from kvpool.process.metrics import MetricsPortError

        from .manager_link import RegistrationRefused
        from .model.errors import ModelError
        from .server import PortInUse, StoppedWhileLoading, run_worker
    except ModuleNotFoundError as error:
        print(
            f"kvpool worker: the package {error.name!r} is missing: a worker needs `pip install kvpool[worker]`",
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
                # Nothing is held and nobody knows this worker; to leave in order would be to wait for the load.
                sys.stderr.flush()
                os._exit(0)
    except (MetricsPortError, ModelError, PortInUse, RegistrationRefused) as error:
        print(f"kvpool worker: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _dry_run(settings: WorkerSettings) -> None:
    from rich.console import Console

    from .dry_run import dry_run

    dry_run(settings, Console(), structlog.get_logger("kvpool.worker").info)


if __name__ == "__main__":
    main()
