"""Runs many seeds, in several processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

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
    """In `jobs` processes, in the order of the seeds."""
    chunks = [seeds[at : at + _SEEDS_PER_TASK] for at in range(0, len(seeds), _SEEDS_PER_TASK)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin_process) as pool:
        try:
            yield from pool.map(run_some, chunks)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
