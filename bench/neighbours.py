"""A step's time next to programs that keep CPUs busy: with several threads, and with one thread, in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from rich.table import Table

from bench.report import print_table, progress
from bench.steps import CASES, MEMORY, step
from kvpool.worker_service.model.device import lower_priority
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.load import load_model
from kvpool.worker_service.model.settings import ModelSettings
from kvpool.worker_service.settings import WorkerSettings

STEPS_PER_TURN: Final = 5
"""Enough for the kernel to treat the threads as it does in a worker that decodes."""
TURN_SECONDS: Final = 0.25
"""A turn of long steps ends earlier."""


@dataclass(frozen=True, slots=True)
class NextTo:
    """Times of a step, in seconds."""

    num_programs: int
    one_thread: Sequence[float]
    all_threads: Sequence[float]

    @property
    def ratio(self) -> float:
        """Of the medians; above 1: the step is slower with all threads than with one. At most 1.2 is wanted."""
        return statistics.median(self.all_threads) / statistics.median(self.one_thread)

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "programs": self.num_programs,
            "one_thread_s": list(self.one_thread),
            "all_threads_s": list(self.all_threads),
            "ratio": self.ratio,
        }


@contextmanager
def busy_programs(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Within the context this many processes compute without a pause, with the nice value of the calling thread."""
    started = []
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen(
                [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
            )
            started.append(process)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            stack.callback(process.wait)
            stack.callback(process.kill)
            process.stdout.readline()  # it computes from here on
        yield started


def measure_turns(
    one_thread: Callable[[], object],
    all_threads: Callable[[], object],
    num_programs: int,
    runs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> NextTo:
    """Time the two kinds of step in turn, `runs` turns each after a warm-up. The programs run meanwhile: see busy_programs."""
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(runs + 1):
        for work, spent in zip((one_thread, all_threads), times, strict=True):
            turn: list[float] = []
            while len(turn) < STEPS_PER_TURN and sum(turn) < TURN_SECONDS:
                began = clock()
                work()
                turn.append(clock() - began)
            if run:
                spent += turn
    return NextTo(num_programs, *times)


def next_to_programs(settings: ModelSettings, numbers: Sequence[int], runs: int) -> dict[str, list[NextTo]]:
    """Native steps of each of CASES next to each number of programs, with a worker's nice value."""
    # A thread of its own, as in a worker: programs that this thread starts keep its nice value.
    nice = WorkerSettings.model_fields["model_nice"].default
    with ThreadPoolExecutor(1, initializer=lower_priority, initargs=(nice,)) as model_thread:
        loaded = model_thread.submit(load_model, settings, progress).result()
        runtime = loaded.runtime
        assert isinstance(runtime, NativeRuntime)
        plan = loaded.plan(MEMORY).kv_cache
        teams = [replace(loaded, runtime=replace(runtime, num_threads=number)) for number in (1, runtime.num_threads)]
        one, several = (model_thread.submit(team.runner, plan).result() for team in teams)
        found: dict[str, list[NextTo]] = {}
        for number in numbers:
            with busy_programs(number):
                for name, shape in CASES.items():
                    progress(f"next to {number}: {name}")
                    work = [partial(runner.execute, step(*shape)) for runner in (one, several)]
                    measuring = model_thread.submit(measure_turns, work[0], work[1], number, runs)
                    found.setdefault(name, []).append(measuring.result())
        for runner in (one, several):
            model_thread.submit(runner.close).result()
    return found


def show_next_to(found: Mapping[str, Sequence[NextTo]], num_threads: int) -> None:
    """Print a table."""
    table = Table("step", "busy programs", "1 thread, ms", f"{num_threads} threads, ms", "ratio", box=None)
    for name, rows in found.items():
        for row in rows:
            spent = [
                f"{statistics.median(seconds) * 1000:.1f} (most {max(seconds) * 1000:.1f})"
                for seconds in (row.one_thread, row.all_threads)
            ]
            table.add_row(name, str(row.num_programs), *spent, f"{row.ratio:.2f}")
    print_table(table)
