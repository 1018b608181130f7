"""What the simulator has found in shipped code, each made as small as it could be."""

from __future__ import annotations

from pathlib import Path

from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from tests.cache_service.edge.life import Life


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
