"""`kvpool drain`: asks, waits until the worker has left, and says so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvpool.cli.commands import drain as drain_module
from kvpool.client import Client, InvalidRequest, NotFound
from tests.cli.conftest import Run
from tests.client.fakes import SESSION, FakeManager, FakeWorker, fake_cluster, serving
from tests.until import until

FOR_EVER = 1_000_000


async def test_it_waits_until_the_worker_has_left(run: Run) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        assert await run("drain", "w", "--grace", "2.5", on=manager) == (0, "w has left\n", "")
        assert [(request.worker_id, request.grace_ms) for request in manager.drains] == [("w", 2500)]
        assert manager.num_describes_until_left == 0


async def test_a_manager_that_forgot_the_order_gets_it_again(run: Run) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.num_drains_forgotten = 1
        manager.num_describes_until_left = 4
        assert await run("drain", "w", on=manager) == (0, "w has left\n", "")
        assert len(manager.drains) == 2


async def test_no_wait_asks_and_returns(run: Run) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        assert await run("drain", "w", "--no-wait", on=manager) == (0, "w is leaving\n", "")
        assert not manager.drains[0].HasField("grace_ms")
        assert not manager.describes


async def test_a_worker_that_is_not_there_or_stays_is_an_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "_BEYOND_GRACE_SECONDS", 0.3)
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.num_describes_until_left = FOR_EVER
        for name, said in (("x", "no live worker 'x'"), ("w", "w has not left after 0.3 s")):
            ran = await run("drain", name, "--grace", "0", on=manager)
            assert ran.status == 1
            assert said in ran.err


async def test_the_manager_may_end_with_its_last_worker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `kvpool up` does: the worker's address refuses connections, so it has left."""
    monkeypatch.setattr(drain_module, "_LOOK_SECONDS", 0.5)
    worker = FakeWorker("w")
    manager = FakeManager([worker])
    manager.num_describes_until_left = FOR_EVER
    async with AsyncExitStack() as served:
        await served.enter_async_context(serving(worker))
        await served.enter_async_context(serving(manager))
        draining = asyncio.ensure_future(run("drain", "w", on=manager))
        await until(lambda: len(manager.describes) >= 2)
        await served.aclose()
        assert await asyncio.wait_for(draining, 60) == (0, "w has left\n", "")


async def test_the_library_returns_the_session_and_refuses_nonsense() -> None:
    async with fake_cluster(FakeWorker("w")) as manager, Client(manager.address) as client:
        assert await client.drain("w") == SESSION
        for grace in (-1, 3601, float("nan")):
            with pytest.raises(InvalidRequest, match="0 to 3600 seconds"):
                await client.drain("w", grace=grace)
        with pytest.raises(NotFound):
            await client.drain("x", grace=0)
        assert len(manager.drains) == 2
