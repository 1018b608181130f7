"""The simulator's seeds hold every law, and give the same run each time. That they find mistakes is shown by tests/mutants."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from tests.cache_service.edge.life import Life
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


async def register(life: Life, worker_id: str, no: int = 1, **told: int) -> int:
    """The number of the session."""
    answer = await life.register(worker_id, no=no, **told)
    assert not isinstance(answer, str), answer
    return answer.session


async def test_two_lives_with_one_epoch_do_not_number_their_sessions_alike(tmp_path: Path) -> None:
    """A disk that lost the epoch: a worker of the one life must not speak in another worker's session of the other."""
    starts = []
    for name in ("a", "b"):
        epochs = FileEpochs.open(tmp_path / name)
        server = ManagerServer(ManagerSettings(state_dir=tmp_path / name), epochs)
        starts.append(server.manager._last_session)
        epochs.close()
    assert starts[0] != starts[1]
    assert {start >> 40 for start in starts} == {1}


async def test_whoever_is_given_stamps_of_a_raised_epoch_knows_it(tmp_path: Path) -> None:
    """ "a" has a session when "b" makes the manager raise its epoch. If it went on, it would hold generations of an epoch that it
    has never been told, and could not tell the next life of a manager, whose disk has lost that epoch, what to outgrow."""
    life = Life(tmp_path)
    before = await register(life, "a")
    await register(life, "b", seen=7)
    assert life.manager.epoch == 8
    assert before not in {session.number for session in life.manager.sessions}
    assert await register(life, "a", 2, seen=1) >> 40 == 8
    life.epochs.close()


async def test_a_worker_that_registers_again_raises_no_epoch(tmp_path: Path) -> None:
    """Its lease ran out: it has seen our epoch from us, and so have all others, who are left alone."""
    life = Life(tmp_path)
    other, number = await register(life, "other"), await register(life, "w")
    life.manager.end_session(number, SessionEnd.EXPIRED)
    again = await register(life, "w", 2, seen=1, last=number)
    assert again >> 40 == life.manager.epoch == 1
    assert {session.number for session in life.manager.sessions} == {other, again}
    life.epochs.close()


async def test_a_register_that_comes_late_does_not_vouch_for_a_worker_of_another_life_with_our_epoch(
    tmp_path: Path,
) -> None:
    """The worker registered with a life under epoch 3, whose disk lost it. The next life has epoch 3 as well, and is reached first
    by a double of that Register, from when the worker had seen epoch 1. Then the worker itself comes: what it holds is of epoch 3,
    and not from us."""
    (tmp_path / "lost").mkdir()
    sessions: list[int] = []
    for name in ("lost", "next"):
        for _ in range(2):
            Life(tmp_path / name).epochs.close()
        life = Life(tmp_path / name, session_start=len(sessions) * 1_000)
        sessions.append(await register(life, "w", 2, seen=1))
        assert life.manager.epoch == 3
    assert await register(life, "w", 3, seen=3, last=sessions[0]) >> 40 == life.manager.epoch == 4
    life.epochs.close()
