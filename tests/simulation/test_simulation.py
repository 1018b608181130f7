"""The simulator's seeds hold every law, and give the same run each time. That they find mistakes is shown by tests/mutants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.runner import SEEDS, Totals, run_all
from tests.simulation.world import World

ROOT = Path(__file__).parents[2]

TOO_RARE = {"refusal: STALE_ATTEMPT", "reconciliation: fences", "reconciliation: fenced"}
"""Reached by one seed in a hundred or fewer; `make prove KIND=simulate` wants them, and tests/cache_service/core has them."""


@pytest.mark.timeout(600)
def test_every_law_holds_in_every_seed_and_the_seeds_reach_everything() -> None:
    """A law that was never looked at and a fault that never happened prove nothing. `make prove KIND=simulate` runs many seeds."""
    totals = Totals()
    for results in run_all(SEEDS, jobs=2):
        for result in results:
            assert result.violation is None, f"replay it: python -m tests.simulation {result.seed} --trace"
            assert result.num_operations >= 200
            assert result.num_faults >= 5
            totals.add(result)
    assert totals.num_runs == len(SEEDS)
    assert set(totals.never()) <= TOO_RARE, "choose other seeds: python -m tests.simulation --seeds 160 --choose"


def test_a_seed_gives_the_same_run_whatever_the_hash_seed() -> None:
    """Nothing in a run may hang on the order of sets or on addresses; in another process neither is the same."""
    script = "from tests.simulation.world import World; print(World(8).run().digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": ".:common"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == World(8).run().digest


def test_tracing_a_seed_changes_nothing_in_it() -> None:
    """Else the trace would be of another run than the one that broke a law."""
    plain, traced = World(5).run(), World(5, is_traced=True).run()
    assert plain.digest == traced.digest
    assert not plain.lines
    assert len(traced.lines) > 300
