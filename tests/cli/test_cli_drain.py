"""`kvpool drain`: asks, waits until the worker has left, and says so."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvpool.cli.commands import drain as drain_module
from kvpool.client import Client, InvalidRequest, NotFound
from tests.client.commands import kvpool
from tests.client.fakes import SESSION, FakeManager, FakeWorker, fake_cluster, serving


async def test_it_waits_until_the_worker_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        assert await kvpool("drain", "w", "--grace", "2.5", "--manager", manager.address) == 0
        assert [(request.worker_id, request.grace_ms) for request in manager.drains] == [("w", 2500)]
        assert manager.num_describes_until_left == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("w has left\n", "")


async def test_a_manager_that_forgot_the_order_is_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    """It restarted meanwhile, and the worker, which had not heard of it, is back in another session."""
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.num_drains_forgotten = 1
        manager.num_describes_until_left = 4
        assert await kvpool("drain", "w", "--manager", manager.address) == 0
        assert len(manager.drains) == 2
    assert capsys.readouterr().out == "w has left\n"


async def test_no_wait_asks_and_returns(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        assert await kvpool("drain", "w", "--no-wait", "--manager", manager.address) == 0
        assert not manager.drains[0].HasField("grace_ms")
        assert not manager.describes
    assert capsys.readouterr().out == "w is leaving\n"


async def test_an_unknown_worker_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        assert await kvpool("drain", "x", "--manager", manager.address) == 1
    assert "no live worker 'x'" in capsys.readouterr().err


async def test_a_worker_that_stays_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "_BEYOND_GRACE_SECONDS", 0.3)
    async with fake_cluster(FakeWorker("w")) as manager:
        manager.num_describes_until_left = 1_000_000
        assert await kvpool("drain", "w", "--grace", "0", "--manager", manager.address) == 1
    assert "w has not left after 0.3 s" in capsys.readouterr().err


async def test_the_manager_may_end_with_its_last_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of `kvpool up` does: the worker's address refuses connections, so it has left."""
    monkeypatch.setattr(drain_module, "_LOOK_SECONDS", 0.5)
    worker = FakeWorker("w")
    manager = FakeManager([worker])
    manager.num_describes_until_left = 1_000_000
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(worker))
        await stack.enter_async_context(serving(manager))
        draining = asyncio.create_task(kvpool("drain", "w", "--manager", manager.address))
        async with asyncio.timeout(60):
            while len(manager.describes) < 2:
                await asyncio.sleep(0.01)
        await stack.aclose()
        assert await asyncio.wait_for(draining, 60) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("w has left\n", "")


async def test_the_library_returns_the_session_and_refuses_nonsense() -> None:
    async with fake_cluster(FakeWorker("w")) as manager, Client(manager.address) as client:
        assert await client.drain("w") == SESSION
        for grace in (-1, 3601, float("nan")):
            with pytest.raises(InvalidRequest, match="0 to 3600 seconds"):
                await client.drain("w", grace=grace)
        with pytest.raises(NotFound):
            await client.drain("x", grace=0)
        assert len(manager.drains) == 2
