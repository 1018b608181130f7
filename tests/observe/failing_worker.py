"""`python -m tests.observe.failing_worker FLAGS…`: a worker whose device fails in every step."""

from __future__ import annotations

import sys
from typing import Any

from kvpool.worker_service.__main__ import main as worker_main
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.step import PartResult, Step


class FailingRunner:
    """A StepRunner that computes nothing."""

    def execute(self, step: Step) -> list[PartResult]:
        raise RuntimeError("a failure that a test has made")


def main() -> int:
    """Run the worker; returns its exit status."""
    make = Engine.__init__

    def make_failing(self: Engine, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self._runner = FailingRunner()

    Engine.__init__ = make_failing  # type: ignore[method-assign]
    return worker_main()


if __name__ == "__main__":
    sys.exit(main())
