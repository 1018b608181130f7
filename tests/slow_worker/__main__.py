"""`python -m tests.slow_worker SECONDS FLAGS…`: a worker on a slow device. Each step takes so much longer, and no more CPU time.

A stream of N tokens lasts at least N times as long, whatever the CPU's speed, so that a fault comes in its middle; and streams that
only have to run while something else happens leave the CPU to that. In one thing it is fast: it waits one second, not ten, for
another process that holds its state folder to end.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from kvpool.worker_service.__main__ import main as worker_main
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.incarnation import WorkerState
from kvpool.worker_service.step import PartResult, Step, StepRunner

LOCK_WAIT_SECONDS = 1.0


class SlowRunner:
    """A StepRunner that sleeps before each step."""

    def __init__(self, runner: StepRunner, seconds: float) -> None:
        self._runner = runner
        self._seconds = seconds

    def execute(self, step: Step) -> list[PartResult]:
        time.sleep(self._seconds)
        return self._runner.execute(step)


def main() -> int:
    """Run the worker; returns its exit status."""
    seconds = float(sys.argv.pop(1))
    make = Engine.__init__

    def make_slow(self: Engine, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self._runner = SlowRunner(self._runner, seconds)

    WorkerState.open = functools.partial(WorkerState.open, wait_seconds=LOCK_WAIT_SECONDS)  # type: ignore[method-assign]
    Engine.__init__ = make_slow  # type: ignore[method-assign]
    return worker_main()


if __name__ == "__main__":
    sys.exit(main())
