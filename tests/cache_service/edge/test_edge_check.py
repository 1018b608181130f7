"""Check over the wire: others are answered between its slices, calls share audits, and one that is given up leaves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvpool.cache_service.core.integrity import OnlineAudit
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import Worker, item, prompt
from tests.until import until

Stub = cache_pb2_grpc.CacheServiceStub


class Watched:
    """Audits that pause after every unit of work, and while they are held; and how many began and are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.num_closed = 0
        self.held = False
        step, begin, close = OnlineAudit.step, CacheManager.begin_audit, OnlineAudit.close

        def begin_audit(manager: CacheManager) -> OnlineAudit:
            self.num_begun += 1
            return begin(manager)

        def close_audit(audit: OnlineAudit) -> None:
            self.num_closed += 1
            close(audit)

        # An audit that is held goes on asking for another slice, and does nothing in it.
        monkeypatch.setattr(OnlineAudit, "step", lambda audit: self.held or step(audit, 1))
        monkeypatch.setattr(OnlineAudit, "close", close_audit)
        monkeypatch.setattr(CacheManager, "begin_audit", begin_audit)

    async def begin(self, stub: Stub) -> Any:
        """A Check whose audit has begun, and is held."""
        self.held = True
        call = asyncio.ensure_future(stub.Check(pb.CheckRequest()))
        await until(lambda: self.num_begun == 1)
        return call


@pytest.fixture
def watched(server: ManagerServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """From now until the end of the test; a server is asked for first, so that its own last check is not watched."""
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        yield watched
        watched.held = False


async def test_other_calls_are_answered_between_the_slices(stub: Stub, worker: Worker, watched: Watched) -> None:
    await worker.allocate(item("a", prompt(9)))
    check = await watched.begin(stub)
    await worker.grant("b", prompt(9, 50))
    assert (await worker.keep_alive()).lease_ms
    assert not check.done()
    watched.held = False
    assert not (await check).violations
    assert (watched.num_begun, watched.num_closed) == (1, 1)


async def test_calls_that_come_during_an_audit_share_the_next(
    stub: Stub, server: ManagerServer, worker: Worker, watched: Watched
) -> None:
    """The one under way may have passed by what was broken before they asked."""
    block = (await worker.grant("a", prompt(9))).tables[0].block_ids[1]
    first = await watched.begin(stub)
    audits = server._servicer.audits
    later = [asyncio.ensure_future(stub.Check(pb.CheckRequest())) for _ in range(3)]
    await until(lambda: audits._next and audits._next.num_waiting >= 3 and server._servicer.counts.num_under_way == 4)
    watched.held = False
    answers = [await call for call in (first, *later)]
    assert [answer.num_sequences_checked for answer in answers] == [1] * 4
    assert (watched.num_begun, watched.num_closed) == (2, 2)
    pool = server.manager.worker("w").pools[0]
    pool._ref_count[block] += 1
    broken = await stub.Check(pb.CheckRequest())
    pool._ref_count[block] -= 1
    assert "references" in [violation.law for violation in broken.violations]


async def test_an_audit_that_nobody_waits_for_is_given_up(stub: Stub, server: ManagerServer, watched: Watched) -> None:
    """The running one as well as the one that is to come; and the next call is served as if nothing had been."""
    running = await watched.begin(stub)
    waiting = stub.Check(pb.CheckRequest())
    audits = server._servicer.audits
    await until(lambda: audits._next)
    waiting.cancel()
    await until(lambda: not audits._next)
    running.cancel()
    await until(lambda: watched.num_closed == 1)
    assert server.manager._tree.walk is None
    watched.held = False
    assert not (await stub.Check(pb.CheckRequest())).violations
    assert (watched.num_begun, watched.num_closed) == (2, 2)


async def test_one_that_leaves_does_not_take_the_audit_of_others_with_it(
    stub: Stub, server: ManagerServer, watched: Watched
) -> None:
    first = await watched.begin(stub)
    leaves, stays = [asyncio.ensure_future(stub.Check(pb.CheckRequest())) for _ in range(2)]
    audits = server._servicer.audits
    await until(lambda: audits._next and audits._next.num_waiting == 2)
    leaves.cancel()
    await until(lambda: audits._next and audits._next.num_waiting == 1)
    watched.held = False
    assert not (await first).violations
    assert not (await stays).violations
    assert leaves.cancelled()
    assert (watched.num_begun, watched.num_closed) == (2, 2)
