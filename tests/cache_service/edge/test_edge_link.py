"""The link: replies may be lost and calls repeated, late or out of order; sessions end by leases, restarts and newer lives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.election.epoch import MAX_EPOCH, MAX_FOREIGN_EPOCH
from kvpool.cache_service.election.file import FileEpochs, encode
from kvpool.cache_service.foreign_epochs import MAX_RAISE
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.cache_service.worker_codec import decode_registration
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.life import LEASE, Life
from tests.cache_service.edge.peer import Worker, item, prompt, refused, registration, run, update
from tests.simulation.rpc import Context

Stub = cache_pb2_grpc.CacheServiceStub


async def test_surplus_goes_back_and_what_is_not_reserved_so_is_ignored(stub: Stub, worker: Worker) -> None:
    grant = (await worker.append(wish=4)).downlink.entries[0].grant
    wrong = run(0, [grant.block_ids[3], 4_000_000_000], [grant.generations[3] - 1, 1])
    surplus = run(0, grant.block_ids[:2], grant.generations[:2])
    uplink = worker.uplink(wish=2, returned=[surplus, wrong])
    reply = await stub.Free(pb.FreeRequest(uplink=uplink))
    assert reply.downlink.counts[0].reserved == 2


async def test_only_a_heartbeat_that_acknowledges_news_renews_the_lease(
    server: ManagerServer, stub: Stub, worker: Worker
) -> None:
    """Over the wire: not set is not 0, and the answers are numbered."""

    def beat(answer_ack: int | None) -> pb.KeepAliveRequest:
        return pb.KeepAliveRequest(session=worker.session, session_key=worker.session_key, answer_ack=answer_ack)

    async def renews(answer_ack: int | None) -> bool:
        before = server.manager.worker("w").lease_end
        numbers.append((await stub.KeepAlive(beat(answer_ack))).number)
        return server.manager.worker("w").lease_end > before

    numbers: list[int] = []
    assert [await renews(ack) for ack in (0, 0, 2, 1, None)] == [True, False, True, False, True]
    assert numbers == [1, 2, 3, 4, 5]
    assert "at most 5" in (await refused(stub.KeepAlive(beat(6)), "BAD_FIELD")).message


# -- registration


async def test_workers_that_register_at_once_with_a_larger_epoch_raise_ours_once(stub: Stub) -> None:
    requests = [registration(f"w{i}", highest_epoch_seen=5) for i in range(8)]
    registered = await asyncio.gather(*map(stub.Register, requests))
    assert len({answer.session for answer in registered}) == 8
    assert {answer.epoch for answer in registered} == {6}


async def test_an_epoch_that_cannot_be_written_is_unavailable_and_changes_nothing(
    settings: ManagerSettings, server: ManagerServer, stub: Stub
) -> None:
    (settings.state_folder / "epoch.tmp").mkdir()
    request = registration(highest_epoch_seen=7)
    await refused(stub.Register(request), "RECOVERING")
    assert server.manager.epoch == 1
    (settings.state_folder / "epoch.tmp").rmdir()
    assert (await stub.Register(request)).epoch == 8


# -- leases


async def test_a_large_fenced_pool_is_swept_at_once_and_calls_are_served_between_the_slices(
    server: ManagerServer, stub: Stub, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one tick; had each slice to wait for its own, a large pool would take long."""
    monkeypatch.setattr("kvpool.cache_service.core.manager.SWEEP_SLICE_NODES", 1)
    await worker.allocate(item("a", prompt(60)))
    await worker.append(update("a", 60))
    order: list[str] = []

    def noted(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def note(*what: Any) -> Any:
            order.append(name)
            return do(*what)

        return note

    monkeypatch.setattr(server.manager, "tick", noted("tick", server.manager.tick))
    monkeypatch.setattr(server.manager, "sweep", noted("slice", server.manager.sweep))
    server.manager.end_session(worker.session, SessionEnd.DEREGISTERED)
    async with asyncio.timeout(30):
        while server.manager.num_unswept_sessions:
            order.append("turn of others")
            await asyncio.sleep(0)
    first = order.index("slice")
    assert order[first - 1] == "tick"
    assert order[first:].count("slice") > 10
    assert "slice slice" not in " ".join(order[first:])


async def test_leases_end_although_sessions_are_begun_and_ended_without_end(
    settings: ManagerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many groups, several between two slices of the sweep, so that it never catches up."""
    monkeypatch.setattr("kvpool.cache_service.core.manager.SWEEP_SLICE_NODES", 1)
    now = 100.0
    epochs = FileEpochs.open(settings.state_folder)
    server = ManagerServer(settings.model_copy(update={"lease_seconds": 0.5}), epochs, clock=lambda: now)
    introduction = decode_registration(registration("again"))
    introduction = introduction._replace(layout=introduction.layout._replace(groups=introduction.layout.groups * 16))
    server.manager.register(decode_registration(registration("dead")), now)

    async def register_again_and_again() -> None:
        nonlocal now
        for register_no in itertools.count(1):
            server.manager.register(introduction._replace(register_no=register_no), now)
            now += 0.01
            await asyncio.sleep(0)

    registering = asyncio.create_task(register_again_and_again())
    async with asyncio.timeout(60):
        while now < 102.0:
            await server._tick()
            await asyncio.sleep(0)
    registering.cancel()
    assert server.manager.num_unswept_sessions < 200
    assert [session.worker_id for session in server.manager.sessions] == ["again"]
    epochs.close()


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
