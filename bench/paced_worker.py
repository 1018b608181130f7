"""`python -m bench.paced_worker STEPS_PER_SECOND FLAGS…`: a real worker whose steps begin at that rate at most, so that its streams
are as fast as those of a GPU and cost this machine only what they cost engine, text and wire."""

from __future__ import annotations

import sys
import time
from typing import Any

from kvpool.worker_service.__main__ import main as worker_main
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.step import PartResult, Step, StepRunner


class PacedRunner:
    """A StepRunner that begins a step at the next beat after the one before."""

    def __init__(self, runner: StepRunner, steps_per_second: float) -> None:
        self._runner = runner
        self._interval = 1 / steps_per_second
        self._next = 0.0

    def execute(self, step: Step) -> list[PartResult]:
        now = time.perf_counter()
        # After a pause the beat begins anew: a step that comes late is not followed by a hurried one.
        self._next = max(self._next, now - self._interval)
        time.sleep(max(0.0, self._next - now))
        self._next += self._interval
        return self._runner.execute(step)


def main() -> int:
    """Run the worker; returns its exit status."""
    rate = float(sys.argv.pop(1))
    make = Engine.__init__

    def make_paced(self: Engine, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self._runner = PacedRunner(self._runner, rate)

    Engine.__init__ = make_paced  # type: ignore[method-assign]
    return worker_main()


if __name__ == "__main__":
    sys.exit(main())
