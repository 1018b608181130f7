"""The link: replies may be lost and calls repeated, late or out of order; sessions end by leases, restarts and newer lives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.cache_service.core.session import SessionEnd
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.cache_service.worker_codec import decode_registration
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import Worker, item, prompt, refused, registration, run, update

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
