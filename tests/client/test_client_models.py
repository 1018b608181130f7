"""Which worker a model is fetched from, and who waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvpool.client import DeadlineExceeded, ProtocolError
from kvpool.client.model_files import receive_model
from kvpool.v1 import worker_pb2
from tests.client.clients import quick
from tests.client.fakes import FakeModel, FakeWorker, fake_cluster


async def test_a_known_model_does_not_wait_for_the_fetch_of_another() -> None:
    known, frozen = FakeWorker("w1"), FakeWorker("w2", model=FakeModel(name="big", fingerprint="fp-big"))
    frozen.may_send_model.clear()
    async with fake_cluster(known, frozen) as manager, quick(manager) as client:
        await client.model("tiny")
        fetch = asyncio.create_task(client.model("big"))
        while not frozen.num_model_calls:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            assert (await client.generate("the", model="tiny").collect()).worker_id == "w1"
        assert not fetch.done()
        frozen.may_send_model.set()
        assert (await fetch).name == "big"


async def test_a_frozen_worker_is_passed_over_when_the_model_is_fetched() -> None:
    """It takes the call and says nothing; its lease still runs. The next one is asked after seconds, not half a minute."""
    frozen, live = FakeWorker("frozen"), FakeWorker("live")
    frozen.may_send_model.clear()
    async with fake_cluster(frozen, live) as manager, quick(manager) as client:
        started = time.monotonic()
        assert (await client.model()).name == "tiny"
        assert time.monotonic() - started < 20
    assert (frozen.num_model_calls, live.num_model_calls) == (1, 1)


async def test_the_time_out_of_the_request_ends_the_wait_for_a_frozen_worker() -> None:
    frozen = FakeWorker("frozen")
    frozen.may_send_model.clear()
    async with fake_cluster(frozen) as manager, quick(manager) as client:
        with pytest.raises(DeadlineExceeded, match="while asking frozen"):
            await client.model(timeout=2.0)


async def messages_after(first_seconds: float, others_seconds: float) -> AsyncIterator[worker_pb2.GetModelResponse]:
    first, *others = FakeModel().messages("w")
    await asyncio.sleep(first_seconds)
    yield first
    for message in others:
        await asyncio.sleep(others_seconds / len(others))
        yield message


async def test_only_the_facts_must_come_at_once() -> None:
    """A large tokenizer over a slow line is no frozen worker."""
    facts, files = await receive_model(messages_after(0.0, 0.5), "w", facts_timeout=0.2)
    assert facts.model_name == "tiny"
    assert files == FakeModel().files
    with pytest.raises(TimeoutError):
        await receive_model(messages_after(0.5, 0.0), "w", facts_timeout=0.2)


async def test_an_answer_that_does_not_begin_with_the_facts_is_refused() -> None:
    async def parts_only() -> AsyncIterator[worker_pb2.GetModelResponse]:
        yield FakeModel().messages("w")[1]

    async def nothing() -> AsyncIterator[worker_pb2.GetModelResponse]:
        for message in FakeModel().messages("w")[:0]:
            yield message

    for messages in (parts_only(), nothing()):
        with pytest.raises(ProtocolError) as caught:
            await receive_model(messages, "w", facts_timeout=1.0)
        assert caught.value.reason == "BAD_MODEL_FILE"
