"""SyncClient: the same client for code without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpool.cli.launch.cluster import free_port
from kvpool.client import Cancelled, Client, ClientConfig, FailedPrecondition, SyncClient
from tests.client.fakes import HANG, FakeManager, FakeWorker, answer, fake_cluster
from tests.client.words import CAT, SAT, THE
from tests.until import until


def sync_client(manager: FakeManager, worker_wait: float = 0.3) -> SyncClient:
    return SyncClient(config=ClientConfig(manager=manager.address, first_contact=10.0, worker_wait=worker_wait))


async def test_a_stream_is_iterated_with_for() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:

        def use() -> tuple[list[tuple[int, ...]], str]:
            with sync_client(manager) as client:
                chunks = [chunk.token_ids for chunk in client.generate("the")]
                completion = client.chat([{"role": "user", "content": "the"}]).collect()
                return chunks, completion.text

        assert await asyncio.to_thread(use) == ([(THE,), (CAT,), (SAT,), ()], " the cat sat")


def leave_the_block(client: SyncClient) -> None:
    with client.generate("the") as stream:
        next(stream)


def drop_the_stream(client: SyncClient) -> None:
    next(client.generate("the"))


@pytest.mark.parametrize("leave", [leave_the_block, drop_the_stream])
async def test_a_reader_that_leaves_cancels_the_call(leave: Callable[[SyncClient], None]) -> None:
    """The stream dies in this thread, the call lives in the client's."""
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager:
        client = sync_client(manager)
        await asyncio.to_thread(leave, client)
        await until(worker.cancelled.is_set)
        await asyncio.to_thread(client.close)


async def test_the_thread_ends_with_the_client() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:

        def use() -> None:
            client = sync_client(manager)
            assert len(client.describe(max_sequences=3).workers) == 1
            assert manager.describes[-1].max_sequences == 3
            assert client.model().name == "tiny"
            assert not client.check().violations
            assert [worker.worker_id for worker in client.route([1], model_fingerprint="fp-tiny").workers] == ["w"]
            client.close()
            client.close()
            with pytest.raises(FailedPrecondition, match="closed"):
                client.describe()

        await asyncio.to_thread(use)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpool-client"]


async def check_closing_wakes(client: SyncClient, use: Callable[[], object], is_waiting: Callable[[], object]) -> None:
    """Closing the client ends the wait of another thread in `use`, by an error that says so."""
    outcome: list[Cancelled] = []

    def run() -> None:
        with pytest.raises(Cancelled) as caught:
            use()
        outcome.append(caught.value)

    # Not to_thread: a thread that never returns must fail this test, not keep the process from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    await until(is_waiting)
    await asyncio.wait_for(asyncio.to_thread(client.close), 30)
    await asyncio.to_thread(thread.join, 5)
    assert not thread.is_alive(), "the thread still waits for a client that is closed"
    (error,) = outcome
    assert error.reason == "CLOSED"


async def test_closing_wakes_a_thread_that_waits_for_the_manager() -> None:
    client = SyncClient(config=ClientConfig(manager=f"127.0.0.1:{free_port()}", first_contact=60.0))
    started = time.monotonic()
    await check_closing_wakes(client, client.describe, lambda: time.monotonic() > started + 0.3)


async def test_closing_wakes_a_thread_that_waits_for_a_worker() -> None:
    async with fake_cluster() as manager:
        client = sync_client(manager, worker_wait=60.0)

        def use() -> None:
            with client.generate("the") as stream:
                stream.collect()

        await check_closing_wakes(client, use, lambda: manager.describes)


async def test_closing_wakes_a_thread_that_tokenises() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(dict[str, str]):
        def items(self) -> Any:
            has_begun.set()
            may_end.wait(30)
            return super().items()

    async with fake_cluster(FakeWorker("w")) as manager:
        client = sync_client(manager)
        stream = client.chat([{"role": "user", "content": Slow(text="the")}])
        await check_closing_wakes(client, stream.collect, has_begun.is_set)
        may_end.set()


async def test_closing_wakes_a_thread_in_the_middle_of_an_answer() -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager:
        client = sync_client(manager)
        stream = client.generate("the")
        await asyncio.to_thread(next, stream)
        started = time.monotonic()
        await check_closing_wakes(client, stream.collect, lambda: time.monotonic() > started + 0.2)
        await until(worker.cancelled.is_set)
        stream.close()
        with pytest.raises(FailedPrecondition, match="closed"):
            next(stream)


async def test_several_threads_share_one_client() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        client = sync_client(manager)
        answers = await asyncio.gather(
            *(asyncio.to_thread(lambda: client.generate("the").collect().text) for _ in range(8))
        )
        await asyncio.to_thread(client.close)
    assert answers == [" the cat sat"] * 8


def test_both_clients_have_the_same_methods() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(method).parameters == inspect.signature(getattr(SyncClient, name)).parameters, name
