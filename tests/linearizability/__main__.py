"""Record and check many histories, each with its own seed: python -m tests.linearizability [ROUNDS]."""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

import structlog

from tests.linearizability.checker import check
from tests.linearizability.workload import record


def main() -> int:
    """Exit status 0 if every history has an order."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began = time.perf_counter()
    num_calls = num_tried = 0
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            history, start = asyncio.run(record(Path(folder), seed, num_calls=40))
        verdict = check(history, start)
        num_calls += len(history)
        num_tried += verdict.num_tried
        if verdict.order is None:
            print(f"round {seed}: {verdict.explanation}", file=sys.stderr)
            return 1
        print(
            f"round {seed}: {len(history)} calls have an order, found in {verdict.num_tried} executions of the model",
            flush=True,
        )
    seconds = time.perf_counter() - began
    print(f"{rounds} histories, {num_calls} calls, {num_tried} executions of the model, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
