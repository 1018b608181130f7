"""SyncClient: the same client for code without an event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

from client import Client, ClientConfig, FailedPrecondition, InvalidRequest, SyncClient
from tests.client.fakes import CAT, HANG, SAT, THE, FakeManager, FakeWorker, answer, fake_cluster


def config(manager: FakeManager) -> ClientConfig:
    return ClientConfig(manager=manager.address, first_contact=0.3, worker_wait=0.3)


async def test_a_stream_is_iterated_with_for() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:

        def use() -> tuple[list[tuple[int, ...]], str]:
            with SyncClient(config=config(manager)) as client:
                chunks = [chunk.token_ids for chunk in client.generate("the")]
                completion = client.chat([{"role": "user", "content": "the"}]).collect()
                return chunks, completion.text

        assert await asyncio.to_thread(use) == ([(THE,), (CAT,), (SAT,), ()], " the cat sat")


async def test_leaving_the_block_cancels_the_call() -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager:

        def use() -> None:
            with SyncClient(config=config(manager)) as client, client.generate("the") as stream:
                next(stream)

        await asyncio.to_thread(use)
        await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_a_stream_that_is_dropped_cancels_its_call() -> None:
    """The object dies in this thread, the call lives in the other one."""
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager:

        def use(client: SyncClient) -> None:
            next(client.generate("the"))

        client = SyncClient(config=config(manager))
        await asyncio.to_thread(use, client)
        await asyncio.wait_for(worker.cancelled.wait(), 5)
        await asyncio.to_thread(client.close)


async def test_the_thread_ends_with_the_client() -> None:
    """Nothing keeps running, closing twice is no error, and a closed client says that it is closed."""
    async with fake_cluster(FakeWorker("w")) as manager:

        def use() -> None:
            client = SyncClient(config=config(manager))
            assert len(client.describe().workers) == 1
            assert client.model().name == "tiny"
            assert not client.check().violations
            assert [worker.worker_id for worker in client.route([1], model_fingerprint="fp-tiny").workers] == ["w"]
            client.close()
            client.close()
            with pytest.raises(FailedPrecondition, match="closed"):
                client.describe()

        await asyncio.to_thread(use)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpool-client"]


async def test_several_threads_share_one_client() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:
        client = SyncClient(config=config(manager))
        answers = await asyncio.gather(
            *(asyncio.to_thread(lambda: client.generate("the").collect().text) for _ in range(8))
        )
        await asyncio.to_thread(client.close)
    assert answers == [" the cat sat"] * 8


async def test_errors_come_out_as_they_are() -> None:
    async with fake_cluster(FakeWorker("w")) as manager:

        def use() -> None:
            with SyncClient(config=config(manager)) as client:
                with pytest.raises(InvalidRequest):
                    client.generate("the", temperature=-1)
                with pytest.raises(InvalidRequest):
                    client.generate([]).collect()

        await asyncio.to_thread(use)


def test_both_clients_have_the_same_methods() -> None:
    """Whoever adds one to Client adds it here."""
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(method).parameters == inspect.signature(getattr(SyncClient, name)).parameters, name
