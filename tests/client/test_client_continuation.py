"""Streams that continue on another worker: the reader gets the text of an undisturbed stream, once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Unpack

import pytest
from google.rpc import code_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client import Chunk, Client, Completion, DeadlineExceeded, FinishReason, GenerateOptions, Times, Unavailable
from kvpool.v1 import worker_pb2
from tests.client.clients import begun, joined, quick
from tests.client.fakes import UNAVAILABLE, FakeWorker, answer, error_status, fake_cluster, usage
from tests.client.storyteller import Story, Storyteller, Telling, story_model, written
from tests.client.words import THE
from tests.until import until

PROMPT = tuple(b"tell me")
WORDS = tuple("a€𝄞bé, abc abd abce!".encode())
STORY = written(PROMPT, *WORDS)
NEVER_FITS = error_status(code_pb2.INVALID_ARGUMENT, "NEVER_FITS", "this worker has 3 blocks")
STALE_ATTEMPT = error_status(code_pb2.FAILED_PRECONDITION, "STALE_ATTEMPT", "goes on elsewhere")
BUSY = error_status(code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "1024 requests are waiting")


async def read(client: Client, **options: Unpack[GenerateOptions]) -> tuple[list[Chunk], Completion]:
    """Every chunk as its reader sees it, and what collect() makes of them."""
    async with client.generate(PROMPT, **options) as stream:
        chunks = [chunk async for chunk in stream]
        return chunks, await stream.collect()


async def undisturbed(story: Story, **options: Unpack[GenerateOptions]) -> Completion:
    async with fake_cluster(Storyteller("w", story)) as manager, quick(manager) as client:
        return (await read(client, **options))[1]


async def check(*workers: Storyteller, **options: Unpack[GenerateOptions]) -> tuple[list[Chunk], Completion]:
    """With these workers the reader sees what it sees without any failure, and the manager has ranked them by all the tokens that
    there were: a worker that has what was generated, from an earlier request or a shared one, has the least to compute."""
    expected = await undisturbed(STORY, **options)
    async with fake_cluster(*workers) as manager, quick(manager) as client:
        chunks, completion = await read(client, **options)
    assert {tuple(memoryview(route.tokens).cast("I")) for route in manager.routes} == {
        tuple(request.token_ids.ids) for worker in workers for request in worker.requests
    }
    assert joined(chunks) == (expected.token_ids, expected.text) == (completion.token_ids, completion.text)
    assert completion.finish_reason == expected.finish_reason
    assert completion.logprobs == expected.logprobs
    assert completion.num_prompt_tokens == expected.num_prompt_tokens == len(PROMPT)
    last = chunks[-1].usage
    assert last is not None
    assert last.num_generated_tokens == len(expected.token_ids) + (
        expected.finish_reason == "stop" and "stop" not in options
    )
    return chunks, completion


@pytest.mark.parametrize("num_delivered", range(1, len(WORDS) + 1))
async def test_a_worker_that_dies_behind_any_token_is_replaced_without_a_trace(num_delivered: int) -> None:
    """Also inside a character, and after the last token when only the end is missing."""
    first, second = Storyteller("w1", STORY, Telling(num_delivered)), Storyteller("w2", STORY)
    _, completion = await check(first, second, temperature=1.0, max_tokens=100, logprobs=0)
    assert [item.logprob for item in completion.logprobs or ()] == [
        -float(position) for position in range(len(PROMPT), len(PROMPT) + len(WORDS))
    ]
    assert (completion.worker_id, completion.num_attempts) == ("w2", 2)
    (one,), (two,) = first.requests, second.requests
    assert tuple(two.token_ids.ids) == PROMPT + WORDS[:num_delivered]
    assert (two.sequence_id, two.sampling) == (one.sequence_id, one.sampling)
    assert (one.attempt, two.attempt) == (1, 2)
    assert (two.stop.max_tokens, two.num_delivered_tokens) == (100 - num_delivered, num_delivered)
    assert first.num_live == second.num_live == 0


async def test_a_stream_may_move_as_often_as_there_are_attempts() -> None:
    first = Storyteller("w1", STORY, Telling(2, num_cached=4), Telling(1, num_cached=8))
    second = Storyteller("w2", STORY, Telling(3, num_cached=8), Telling(num_cached=12))
    chunks, completion = await check(first, second)
    moves = sorted({(chunk.attempt, chunk.worker_id) for chunk in chunks})
    assert moves == [(1, "w1"), (2, "w2"), (3, "w1"), (4, "w2")]
    # What the cache gave to the first admission; later ones found generated tokens too, which are none of the prompt.
    assert completion.num_cached_tokens == 4
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert {usage.num_prompt_tokens for usage in usages} == {7}
    assert [usage.num_generated_tokens for usage in usages] == [0, 2, 5, 6, len(WORDS) + 1]


async def test_the_times_of_an_answer_are_those_of_the_worker_that_finished_it() -> None:
    """What came before it is counted here, because no worker knows it."""
    late = asyncio.Event()
    first = FakeWorker("w1", [*answer(THE)[:1], late, UNAVAILABLE])
    end = worker_pb2.GenerateResponse(usage=usage(num_generated=1), finish_reason=worker_pb2.FINISH_REASON_STOP)
    end.usage.times.CopyFrom(worker_pb2.Times(waiting_ms=2, prefill_ms=3, decode_ms=5, preempted_ms=7))
    second = FakeWorker("w2", [end])
    async with (
        fake_cluster(first, second) as manager,
        quick(manager) as client,
        client.generate("the dog", max_tokens=9) as stream,
    ):
        await anext(stream)
        await asyncio.sleep(0.05)
        late.set()
        completion = await stream.collect()
    assert completion.worker_id == "w2"
    assert completion.times is not None
    assert completion.times.before_ms >= 50
    assert replace(completion.times, before_ms=0) == Times(0, 2, 3, 5, 7)


async def test_a_worker_that_freezes_in_the_middle_is_left_when_its_lease_has_ended() -> None:
    """Until then it may be busy. What it says when it thaws reaches nobody: neither its tokens nor that it is superseded."""
    thaws = asyncio.Event()
    frozen, live = Storyteller("frozen", STORY, Telling(4, STALE_ATTEMPT, thaws)), Storyteller("live", STORY)
    async with fake_cluster(frozen, live) as manager, quick(manager) as client:
        task = asyncio.create_task(read(client))
        await until(lambda: len(manager.describes) >= 5)
        assert not live.requests, "a busy worker with a lease was given up"
        manager.workers = [live]
        await asyncio.wait_for(live.asked.wait(), 30)
        thaws.set()
        chunks, completion = await task
        await asyncio.wait_for(frozen.cancelled.wait(), 30)
    assert joined(chunks) == (WORDS, bytes(WORDS).decode())
    assert completion.worker_id == "live"


async def test_a_worker_that_another_process_has_replaced_is_left_at_once() -> None:
    """Its machine lost its power, so no connection was closed; the same name serves at the same address again."""
    worker = Storyteller("w", STORY, Telling(4, waits_for=asyncio.Event()))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        task = asyncio.create_task(read(client))
        await until(lambda: len(manager.describes) >= 3)
        assert len(worker.requests) == 1
        worker.incarnation += 1
        chunks, completion = await asyncio.wait_for(task, 30)
    assert joined(chunks) == (WORDS, bytes(WORDS).decode())
    assert completion.num_attempts == 2


async def test_the_others_are_asked_before_the_one_that_failed() -> None:
    """Although the manager still ranks it first: it holds the prefix."""
    first, full = Storyteller("w1", STORY, Telling(2)), Storyteller("w2", STORY, Telling(0, BUSY))
    small = Storyteller("w3", STORY, Telling(0, NEVER_FITS))
    last = Storyteller("w4", STORY)
    _, completion = await check(first, full, small, last)
    assert (completion.worker_id, completion.num_attempts) == ("w4", 4)
    assert len(first.requests) == 1


async def test_when_the_attempts_are_used_up_the_error_tells_all() -> None:
    down = error_status(code_pb2.UNAVAILABLE, "RECOVERING", "I am recovering")
    first, second = Storyteller("w1", STORY, Telling(3), Telling(0)), Storyteller("w2", STORY, Telling(0, down))
    async with fake_cluster(first, second) as manager, quick(manager, max_attempts=3) as client:
        stream = client.generate(PROMPT)
        with pytest.raises(Unavailable) as caught:
            await stream.collect()
        assert await stream.next_chunk() is None
    error = caught.value
    assert (error.reason, error.metadata["num_delivered_tokens"]) == ("NO_WORKER_ANSWERED", "3")
    for part in ("after 3 tokens", "3 attempts", "w1", "w2", "I am recovering", "draining", "ask again"):
        assert part in str(error)
    assert str(error).count("I am recovering") == 1
    assert len(first.requests) + len(second.requests) == 3
    assert first.num_live == second.num_live == 0


async def test_the_deadline_holds_while_the_stream_moves() -> None:
    worker = Storyteller("w1", STORY, Telling(3))
    async with fake_cluster(worker) as manager, quick(manager, worker_wait=60.0) as client:
        stream = await begun(client.generate(PROMPT, timeout=1.5), 3)
        manager.workers = []
        with pytest.raises(DeadlineExceeded, match=r"after 3 tokens.*before that, w1") as caught:
            await asyncio.wait_for(stream.collect(), 30)
    assert caught.value.reason == "TIMEOUT"


async def test_when_no_worker_is_left_the_error_says_so() -> None:
    async with fake_cluster(Storyteller("w1", STORY, Telling(3))) as manager, quick(manager) as client:
        stream = await begun(client.generate(PROMPT), 3)
        manager.workers = [Storyteller("other", STORY, model=story_model())]
        manager.workers[0].model.fingerprint = "fp-other"
        with pytest.raises(Unavailable, match=r"after 3 tokens.*no live worker serves tiny.*before that, w1") as caught:
            await stream.collect()
    assert caught.value.reason == "NO_WORKER"


@pytest.mark.parametrize(("max_model_len", "options"), [(1000, GenerateOptions(max_tokens=4)), (len(PROMPT) + 4, {})])
async def test_a_stream_that_lacks_only_its_end_is_complete(max_model_len: int, options: GenerateOptions) -> None:
    story = written(PROMPT, *b"abcdef")
    first, second = (
        Storyteller(name, story, Telling(keeps_end=True, num_cached=4), model=story_model(max_model_len))
        for name in ("w1", "w2")
    )
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        chunks, completion = await read(client, **options)
    assert joined(chunks) == (tuple(b"abcd"), "abcd")
    assert (completion.finish_reason, completion.num_cached_tokens) == (FinishReason.LENGTH, 4)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.num_generated_tokens == 4
    assert not second.requests


async def test_cancelling_a_stream_that_moves_leaves_no_call_behind() -> None:
    silent = Telling(0, waits_for=asyncio.Event())
    first, second = Storyteller("w1", STORY, Telling(3)), Storyteller("w2", STORY, silent)
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        task = asyncio.create_task(read(client))
        await second.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(second.cancelled.wait(), 30)
        assert first.num_live == second.num_live == 0


async def test_closing_a_stream_that_looks_for_a_worker_asks_none() -> None:
    """Another task closes it, e.g. SyncStream.close(); the worker that comes back is not bothered."""
    worker = Storyteller("w1", STORY, Telling(3))
    async with fake_cluster(worker) as manager, quick(manager, worker_wait=30.0) as client:
        stream = await begun(client.generate(PROMPT), 3)
        manager.workers = []
        task = asyncio.create_task(stream.next_chunk())
        await until(lambda: len(manager.routes) >= 2)
        await stream.aclose()
        manager.workers = [worker]
        with pytest.raises(Exception, match="closed while it looked"):
            await asyncio.wait_for(task, 30)
    assert len(worker.requests) == 1


async def test_an_error_that_is_nobodys_absence_is_not_carried_on() -> None:
    """A request that makes one worker fail would make the next one fail."""
    bug = error_status(code_pb2.INTERNAL, "INTERNAL", "the model step failed")
    first, second = Storyteller("w1", STORY, Telling(3, bug)), Storyteller("w2", STORY)
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        with pytest.raises(Exception, match="the model step failed"):
            await read(client)
    assert not second.requests


@settings(max_examples=20)
@given(
    tokens=st.text("ab€𝄞é", min_size=1, max_size=12).map(lambda text: tuple(text.encode())),
    stop=st.lists(st.text("ab€é", min_size=1, max_size=3), max_size=2),
    breaks=st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(1, 5), min_size=1, max_size=3)), max_size=4),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 12),
    echo=st.booleans(),
)
async def test_however_often_and_wherever_it_moves_the_text_is_the_same(
    tokens: tuple[int, ...],
    stop: list[str],
    breaks: list[tuple[int, list[int]]],
    max_tokens: int,
    min_tokens: int,
    echo: bool,
) -> None:
    story = written(PROMPT, *tokens)
    options = GenerateOptions(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), stop=stop, echo=echo)
    expected = await undisturbed(story, **options)
    workers = [
        Storyteller(f"w{index}", story, Telling(after, sizes=sizes)) for index, (after, sizes) in enumerate(breaks)
    ]
    async with fake_cluster(*workers, Storyteller("last", story)) as manager, quick(manager) as client:
        chunks, completion = await read(client, **options)
    assert joined(chunks) == (expected.token_ids, expected.text)
    assert completion.finish_reason == expected.finish_reason
