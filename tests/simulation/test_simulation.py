"""The simulator's seeds hold every law, give the same run each time, and notice when the code is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.breaks import BREAKS, FOUND_LATE
from tests.simulation.runner import run_all
from tests.simulation.totals import Totals
from tests.simulation.world import World

NUM_SEEDS = 160
SEEDS_PER_TEST = 80
ROOT = Path(__file__).parents[2]

TOO_RARE = {"refusal: STALE_ATTEMPT", "reconciliation: fences", "reconciliation: fenced"}
"""Reached by one seed in a hundred or fewer; `make simulate` wants them, and tests/cache_service/core has them."""

_totals = Totals()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1, NUM_SEEDS + 1, SEEDS_PER_TEST))
def test_every_law_holds_in_every_seed(first: int) -> None:
    """Of the first; `make simulate` runs ten thousand."""
    num_runs = 0
    for results in run_all(range(first, first + SEEDS_PER_TEST), jobs=2):
        for result in results:
            assert result.violation is None, f"replay it: python -m tests.simulation {result.seed} --trace"
            assert result.num_operations >= 200
            assert result.faults.total() >= 5
            _totals.add(result)
            num_runs += 1
    assert num_runs == SEEDS_PER_TEST


def test_the_seeds_have_reached_everything() -> None:
    """A law that was never looked at and a fault that never happened prove nothing."""
    if _totals.num_runs < NUM_SEEDS:
        pytest.skip("counts what the tests before it have reached, and not all of them ran")
    assert set(_totals.never()) <= TOO_RARE


@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_gives_the_same_run_whatever_the_hash_seed(seed: int) -> None:
    """Nothing in a run may hang on the order of sets or on addresses; in another process neither is the same."""
    digests = {World(seed).run().digest}
    script = f"from tests.simulation.world import World; print(World({seed}).run().digest)"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": ".:common"}
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_tracing_a_seed_changes_nothing_in_it() -> None:
    """Else the trace would be of another run than the one that broke a law."""
    plain, traced = World(5).run(), World(5, is_traced=True).run()
    assert plain.digest == traced.digest
    assert not plain.lines
    assert len(traced.lines) > 300


@pytest.mark.parametrize("name", BREAKS)
def test_broken_code_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these mistakes breaks one of the laws that are about it, in one of the seeds in which all laws hold without it."""
    breaks, laws = BREAKS[name]
    breaks(monkeypatch)
    first = FOUND_LATE.get(name, 1)
    for seed in (*range(first, NUM_SEEDS + 1), *range(1, first)):
        violation = World(seed).run().violation
        if violation is not None:
            assert violation.law in laws, violation
            return
    pytest.fail(f"{NUM_SEEDS} seeds have found nothing")
