"""Requests of one client to one worker share a stream: when, and what it means for each of them."""

from __future__ import annotations

import asyncio

import pytest

from kvpool.client import DeadlineExceeded, ResourceExhausted, answer_streams
from kvpool.v1 import worker_pb2
from tests.client.clients import begun, quick
from tests.client.fakes import HANG, FakeWorker, answer, fake_cluster
from tests.client.words import CAT, SAT, THE
from tests.until import until

HANGING = [*answer(THE, CAT)[:1], HANG]


async def test_requests_at_the_same_time_share_a_stream_and_without_requests_there_is_none() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        completions = await asyncio.gather(*(client.generate("the cat", max_tokens=9).collect() for _ in range(20)))
        assert {completion.token_ids for completion in completions} == {(THE, CAT, SAT)}
        assert worker.num_streams == 1
        assert not client._channels._answer_streams._open
        await until(lambda: worker.num_open_streams == 0)  # a worker that stops waits for no client
        await client.generate("the cat", max_tokens=9).collect()
        assert worker.num_streams == 2


@pytest.mark.parametrize("timeout", [None, 1.0], ids=["cancelled", "out of time"])
async def test_a_request_that_ends_before_its_answer_leaves_the_others(timeout: float | None) -> None:
    go_on = asyncio.Event()
    rest = answer(THE, CAT, SAT)
    worker = FakeWorker("w", HANGING, [rest[0], go_on, *rest[1:]])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        doomed = await begun(client.generate("the", max_tokens=9, timeout=timeout))
        other = await begun(client.generate("the", max_tokens=9))
        if timeout is None:
            await doomed.aclose()
        else:
            with pytest.raises(DeadlineExceeded, match=r"time-out of 1 s .* 1 tokens were there"):
                await doomed.collect()
        await until(worker.cancelled.is_set)
        go_on.set()
        assert (await other.collect()).token_ids == (THE, CAT, SAT)
        assert worker.num_streams == 1


async def test_an_answer_that_is_not_read_ends_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_streams, "MAX_UNREAD_BYTES", 5_000)
    endless = [
        answer(THE)[0],
        *(worker_pb2.GenerateResponse(start_index=at, token_ids=[CAT] * 100) for at in range(1, 5_000, 100)),
        HANG,
    ]
    worker = FakeWorker("w", endless, answer(THE, CAT, SAT))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        unread = await begun(client.generate("the", max_tokens=9_000))
        await until(worker.cancelled.is_set)
        assert (await client.generate("the", max_tokens=9).collect()).token_ids == (THE, CAT, SAT)
        with pytest.raises(ResourceExhausted, match="were not read") as caught:
            await unread.collect()
        assert caught.value.reason == "SLOW_READER"
        assert len(worker.requests) == 2, "another worker would generate what is not read either"


async def test_a_reader_that_is_late_all_the_time_may_take_any_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_streams, "MAX_UNREAD_BYTES", 1_000)
    answers = answer_streams.Answers(lambda: None, lambda: None)
    for at in range(100):
        answers.put(worker_pb2.GenerateResponse(start_index=at, token_ids=[CAT] * 100))
        if at:
            assert (await answers.read()).start_index == at - 1
    assert not answers.has_ended


async def test_the_stream_to_a_lost_worker_takes_no_new_requests() -> None:
    """It has another request, whose watch has not found out yet."""
    worker = FakeWorker("w", HANGING, HANGING, answer(THE))
    async with fake_cluster(worker) as manager, quick(manager, liveness_interval=30.0) as client:
        lost, other = [await begun(client.generate("the", max_tokens=9)) for _ in range(2)]
        assert lost._call is not None
        lost._call._give_up("its lease has ended")
        assert (await client.generate("the", max_tokens=9).collect()).token_ids == (THE,)
        assert worker.num_streams == 2
        await lost.aclose()
        await other.aclose()


async def test_an_old_stream_takes_no_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a client which always has requests moves to a new connection when a server asks it to."""
    monkeypatch.setattr(answer_streams, "MAX_AGE_SECONDS", 0.0)
    worker = FakeWorker("w", HANGING, answer(THE))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        old = await begun(client.generate("the", max_tokens=9))
        assert (await client.generate("the", max_tokens=9).collect()).token_ids == (THE,)
        assert worker.num_streams == 2
        await old.aclose()
        await until(lambda: worker.num_open_streams == 0)


async def test_a_stream_has_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads no more than it has room for: with more than that, a cancel would wait for an answer to end."""
    monkeypatch.setattr(answer_streams, "MAX_REQUESTS", 3)
    worker = FakeWorker("w", HANGING)
    async with fake_cluster(worker) as manager, quick(manager) as client:
        streams = [await begun(client.generate("the cat", max_tokens=9)) for _ in range(7)]
        assert worker.num_streams == 3
        for stream in streams:
            await stream.aclose()


async def test_closing_the_client_ends_the_streams() -> None:
    worker = FakeWorker("w", HANGING)
    async with fake_cluster(worker) as manager:
        async with quick(manager) as client:
            _stream = await begun(client.generate("the", max_tokens=9))
        await until(lambda: worker.num_open_streams == 0)
        assert worker.num_live == 0


class FakeCall:
    """A call on whose other side a test answers."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[worker_pb2.GenerateManyResponse] = asyncio.Queue()

    async def read(self) -> worker_pb2.GenerateManyResponse:
        return await self.answers.get()

    def cancel(self) -> None:
        pass


async def test_an_answer_that_was_on_its_way_when_its_request_was_cancelled_is_dropped() -> None:
    call = FakeCall()
    stream = answer_streams._Stream(lambda _: call, lambda _: None)
    cancelled, other = (stream.begin(worker_pb2.GenerateRequest()) for _ in range(2))
    cancelled.cancel(Exception("the reader has left"))
    late, right = (worker_pb2.GenerateResponse(text=text) for text in ("late", "right"))
    call.answers.put_nowait(
        worker_pb2.GenerateManyResponse(
            answers=[worker_pb2.Answer(number=1, response=late), worker_pb2.Answer(number=2, response=right)]
        )
    )
    async with asyncio.timeout(5):
        assert (await other.read()).text == "right"
    stream._reading.cancel()
    await asyncio.gather(stream._reading, return_exceptions=True)
