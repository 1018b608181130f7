"""Runs many seeds, in several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from tests.simulation.world import Result, World

REPEAT_EVERY = 100
"""Each so-manieth seed is run twice, and the two traces must be the same."""
_SEEDS_PER_TASK = 10


class NotReproducible(Exception):
    """One seed gave two runs."""


def run(seed: int) -> Result:
    """One seed; each `REPEAT_EVERY`th twice. Raises NotReproducible."""
    result = World(seed).run()
    if seed % REPEAT_EVERY == 0:
        again = World(seed).run()
        if again.digest != result.digest:
            raise NotReproducible(f"seed {seed} has two traces: {result.digest} and {again.digest}")
    return result


def run_some(seeds: Sequence[int]) -> list[Result]:
    """Several seeds, up to the first that breaks a law."""
    results = []
    for seed in seeds:
        results.append(run(seed))
        gc.collect()  # a world is one large cycle
        if results[-1].violation is not None:
            break
    return results


def _begin_process() -> None:
    """What was imported is not gone through again after each run."""
    gc.collect()
    gc.freeze()


def run_all(seeds: Sequence[int], jobs: int) -> Iterator[list[Result]]:
    """In `jobs` processes, as they come in."""
    tasks = iter(seeds[at : at + _SEEDS_PER_TASK] for at in range(0, len(seeds), _SEEDS_PER_TASK))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_process) as pool:
        waiting: set[Future[list[Result]]] = set()
        try:
            while True:
                for task in tasks:
                    waiting.add(pool.submit(run_some, task))
                    if len(waiting) >= 2 * jobs:
                        break
                if not waiting:
                    return
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
