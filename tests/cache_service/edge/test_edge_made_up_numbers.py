"""Numbers that a peer may make up, in a Register: they neither lock a worker out nor use up the epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.cache_service.election.epoch import MAX_EPOCH, MAX_FOREIGN_EPOCH
from kvpool.cache_service.election.file import encode
from kvpool.cache_service.foreign_epochs import MAX_RAISE
from kvpool.v1 import cache_pb2 as pb
from tests.cache_service.edge.life import LEASE, Life
from tests.cache_service.edge.peer import registration
from tests.simulation.rpc import Context

LARGEST = (1 << 64) - 1
Begin = Callable[..., Life]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a life; `epoch`: the one of its state file, 0 for none. The life before ends."""
    lives: list[Life] = []

    def begin(epoch: int = 0) -> Life:
        if lives:
            lives[-1].epochs.close()
        if epoch:
            (tmp_path / "epoch").write_bytes(encode(epoch))
        else:
            (tmp_path / "epoch").unlink(missing_ok=True)
        lives.append(Life(tmp_path))
        return lives[-1]

    yield begin
    lives[-1].epochs.close()


# -- incarnations


async def test_a_worker_that_was_away_returns_after_the_largest_incarnation(begin: Begin) -> None:
    """The made-up one gets a session, since nobody else has one, and does not renew it: two leases later all is as before."""
    life = begin()
    made_up = registration("w", incarnation=LARGEST)
    assert (await life.servicer.Register(made_up, Context())).session  # type: ignore[arg-type]
    answers: list[pb.RegisterResponse | str] = []
    while life.now < 3 * LEASE:
        answers.append(await life.register("w", no=2 + len(answers)))
        life.now += 0.5
        life.manager.tick(life.now)
        if not isinstance(answers[-1], str):
            break
    assert set(answers[:-1]) == {"STALE_INCARNATION"}
    assert not isinstance(answers[-1], str)
    assert life.now <= 2 * LEASE + 0.5


# -- epochs


async def test_describe_says_how_long_workers_of_the_life_before_may_come_back(begin: Begin) -> None:
    """A lease from the start of a life that follows another, and from when a raised epoch has ended all sessions."""
    assert await begin().former_lease_ms() == 0
    life = begin(7)
    found = []
    for now in (0.0, LEASE - 1, LEASE + 1):
        life.now = now
        found.append(await life.former_lease_ms())
    assert found == [6000, 1000, 0]
    await life.register("w", seen=41)
    assert await life.former_lease_ms() == 6000


async def test_an_epoch_that_describe_shows_raises_ours_once_in_a_life(begin: Begin) -> None:
    """Without a session of ours, over and over; what a worker that is ours holds is lost once at most, if at all."""
    life = begin(7)
    told = [await life.epoch_after(f"made up {index}", life.manager.epoch) for index in range(60)]
    assert told == [9] + ["FOREIGN_EPOCH"] * 59
    honest = await life.register("honest")
    assert not isinstance(honest, str)
    life.now += 1000 * LEASE
    assert await life.epoch_after("made up", life.manager.epoch) == "FOREIGN_EPOCH"
    assert life.on_disk == life.manager.epoch == 9
    assert honest.session in {session.number for session in life.manager.sessions}


async def test_without_a_state_file_the_epoch_is_raised_once_a_lease_and_by_a_bounded_sum(begin: Begin) -> None:
    """Workers may come with several epochs then; the longest series of claims is worth 2**16 epochs."""
    life = begin()
    assert await life.epoch_after("a", 41) == 42
    assert await life.epoch_after("b", 50) == "FOREIGN_EPOCH"
    life.now += LEASE
    assert await life.epoch_after("b", 50) == 51
    for step in range(40):
        life.now += LEASE
        await life.epoch_after(f"made up {step}", life.manager.epoch + 5_000)
    assert 1 + MAX_RAISE - 5_000 <= life.manager.epoch <= 1 + MAX_RAISE
    assert life.on_disk == life.manager.epoch


@pytest.mark.parametrize(
    "ours", [0, 1, 7, 1 << 16, 1 << 20, MAX_FOREIGN_EPOCH - 2, MAX_FOREIGN_EPOCH + 5, MAX_EPOCH - 2]
)
@pytest.mark.parametrize("claim", [(1 << 23) - 1, 1 << 23, MAX_EPOCH - 1, MAX_EPOCH])
async def test_no_message_uses_up_the_epochs(begin: Begin, ours: int, claim: int) -> None:
    """Not in one life, nor in many: the upper half of them is raised into by restarts only."""
    life = begin(ours)
    for _ in range(3):
        began = life.manager.epoch
        for number in range(4):
            answer = await life.epoch_after(f"made up {number}", claim)
            life.now += LEASE
        if claim > life.manager.epoch:
            assert answer == "FOREIGN_EPOCH"
        assert life.manager.epoch <= max(began, min(began + MAX_RAISE, MAX_FOREIGN_EPOCH))
        if life.on_disk >= MAX_EPOCH:
            break
        life = begin(life.on_disk)


@pytest.mark.parametrize("ours", [0, 1, 9, 1 << 18, MAX_FOREIGN_EPOCH, MAX_EPOCH - 2])
@pytest.mark.parametrize("seen", [2, 10, 1 << 16, (1 << 18) + 2, MAX_FOREIGN_EPOCH + 1, MAX_EPOCH - 1, MAX_EPOCH])
async def test_an_honest_worker_is_taken_whatever_epoch_it_has_seen(begin: Begin, ours: int, seen: int) -> None:
    """The state file was lost (0), or is an old copy, or all is well: it is either served under a larger epoch, or told to drop its
    blocks and served when it has."""
    life = begin(ours)
    last = 0
    answer = await life.register("honest", seen=seen, last=last)
    if answer == "FOREIGN_EPOCH":
        answer = await life.register("honest", seen=0, last=0, no=2)
    else:
        assert not isinstance(answer, str)
        assert answer.epoch > seen
    assert not isinstance(answer, str)
    assert answer.epoch == life.manager.epoch == life.on_disk


async def test_a_register_that_is_refused_raises_no_epoch(begin: Begin) -> None:
    life = begin(7)
    assert not isinstance(await life.register("w", no=5), str)
    assert await life.register("w", no=5, seen=41) == "STALE_REGISTER"
    assert await life.register("w" * 200, seen=41) == "BAD_FIELD"
    assert await life.register("v", seen=MAX_EPOCH + 1) == "BAD_FIELD"
    assert life.manager.epoch == life.on_disk == 8
