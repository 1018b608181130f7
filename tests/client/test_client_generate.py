"""generate() and chat() with one worker: what it is sent, what comes back, and how a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvpool.client import Completion, FinishReason, GenerateStream, InvalidRequest, ProtocolError
from kvpool.v1 import worker_pb2
from tests.client.clients import quick
from tests.client.fakes import HANG, UNAVAILABLE, FakeModel, FakeWorker, answer, fake_cluster, usage
from tests.client.words import ASSISTANT, BOS, CAT, SAT, THE, USER
from tests.until import until


async def test_chunks_arrive_in_order_and_collect_puts_them_together() -> None:
    worker = FakeWorker("w", answer(THE, CAT, SAT, num_cached=4))
    async with (
        fake_cluster(worker) as manager,
        quick(manager) as client,
        client.generate("the dog", max_tokens=9) as stream,
    ):
        chunks = [await anext(stream), await anext(stream)]
        completion = await stream.collect()
    assert [(chunk.start_index, chunk.token_ids, chunk.text) for chunk in chunks] == [
        (0, (THE,), " the"),
        (1, (CAT,), " cat"),
    ]
    assert completion.time_to_first_token_ms > 0
    assert completion == Completion(
        text=" the cat sat",
        token_ids=(THE, CAT, SAT),
        finish_reason=FinishReason.STOP,
        num_prompt_tokens=4,
        num_cached_tokens=4,
        num_generated_tokens=3,
        worker_id="w",
        time_to_first_token_ms=completion.time_to_first_token_ms,
        logprobs=None,
        num_preemptions=0,
        num_attempts=1,
    )
    assert worker.requests[0].stop.max_tokens == 9


async def test_the_prompt_is_tokenised_here_and_routed_under_its_root() -> None:
    """Without the cutting and padding of the tokenizer, and with the whole namespace, so that tenants do not meet."""
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await client.generate("the cat sat on", adapter="lora", tenant_salt="salt").collect()
    (route,) = manager.routes
    (request,) = worker.requests
    assert list(request.token_ids.ids) == [BOS, THE, CAT, SAT, 8]
    assert route.tokens == b"".join(token.to_bytes(4, "little") for token in request.token_ids.ids)
    assert (route.root.model_fingerprint, route.root.adapter, route.root.tenant_salt) == ("fp-tiny", "lora", "salt")
    assert (request.model_fingerprint, request.adapter, request.tenant_salt) == ("fp-tiny", "lora", "salt")
    assert request.attempt == 1
    assert request.sequence_id


async def test_a_chat_is_rendered_by_the_template_and_gets_no_second_bos() -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await client.chat([{"role": "user", "content": "the cat"}]).collect()
    assert list(worker.requests[0].token_ids.ids) == [BOS, USER, THE, CAT, ASSISTANT]


async def test_a_prompt_of_token_ids_needs_no_tokenizer() -> None:
    worker = FakeWorker("w", model=FakeModel(files={}))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await client.generate([5, 6]).collect()
        with pytest.raises(InvalidRequest, match="token ids"):
            await client.generate("the").collect()
        with pytest.raises(InvalidRequest, match="chat template"):
            await client.chat([{"role": "user", "content": "the"}]).collect()
    assert list(worker.requests[0].token_ids.ids) == [5, 6]


@pytest.mark.parametrize(
    ("prompt", "reason"), [([], "BAD_FIELD"), ([99], "BAD_FIELD"), ([-1], "BAD_FIELD"), ([5] * 32, "NEVER_FITS")]
)
async def test_a_prompt_that_can_never_work_is_refused_before_anybody_is_asked(prompt: list[int], reason: str) -> None:
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(prompt).collect()
    assert caught.value.reason == reason
    assert not manager.routes


async def test_a_prompt_that_is_not_utf_8_is_refused() -> None:
    """As Python reads an argument that is not: with a surrogate for each byte."""
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match=r"no valid text at character 3 \('\\udcff'\)"):
            await client.generate("abc\udcff").collect()


async def test_the_model_is_fetched_once() -> None:
    """Later requests ask for Route and Generate only, also when the worker has another session."""
    worker = FakeWorker("w")
    # Whoever waits for long looks whether the worker lives, which is a Describe too.
    async with fake_cluster(worker) as manager, quick(manager, liveness_interval=60.0) as client:
        await asyncio.gather(*(client.generate("the").collect() for _ in range(16)))
        worker.session += 1
        await client.generate("the").collect()
    assert (worker.num_model_calls, len(manager.describes), len(manager.routes)) == (1, 1, 17)
    assert len({request.sequence_id for request in worker.requests}) == 17


async def test_a_file_that_does_not_match_its_digest_is_not_believed() -> None:
    worker = FakeWorker("w", model=FakeModel(is_corrupt=True))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(ProtocolError) as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "DIGEST_MISMATCH"
    assert not worker.requests


@pytest.mark.parametrize("start_index", [0, 2])
async def test_tokens_out_of_place_are_not_taken(start_index: int) -> None:
    first = answer(THE)[0]
    wrong = worker_pb2.GenerateResponse(start_index=start_index, token_ids=[CAT], text=" cat")
    async with fake_cluster(FakeWorker("w", [first, wrong, HANG])) as manager, quick(manager) as client:
        stream = client.generate("the")
        await anext(stream)
        with pytest.raises(ProtocolError) as caught:
            await anext(stream)
    assert caught.value.reason == "OUT_OF_ORDER"


async def test_a_stream_that_just_ends_is_no_answer() -> None:
    async with fake_cluster(FakeWorker("w", answer(THE, CAT)[:2])) as manager, quick(manager) as client:
        with pytest.raises(ProtocolError, match="finish reason"):
            await client.generate("the").collect()


async def leave_the_block(stream: GenerateStream) -> None:
    async with stream:
        await anext(stream)


async def break_out_of_the_loop(stream: GenerateStream) -> None:
    async for _ in stream:
        break


async def cancel_the_task(stream: GenerateStream) -> None:
    await anext(stream)
    task = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_the_block, break_out_of_the_loop, cancel_the_task])
async def test_a_reader_that_leaves_cancels_the_call(leave: Callable[[GenerateStream], Awaitable[None]]) -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await leave(client.generate("the"))
        await until(worker.cancelled.is_set)
        assert worker.num_live == 0


async def test_logprobs_come_with_their_tokens() -> None:
    message = worker_pb2.GenerateResponse(
        token_ids=[THE], text=" the", usage=usage(), finish_reason=worker_pb2.FINISH_REASON_LENGTH
    )
    message.logprobs.add(logprob=-0.5, top_token_ids=[THE, CAT], top_logprobs=[-0.5, -1.5])
    worker = FakeWorker("w", [message])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        completion = await client.generate("the", logprobs=2).collect()
    assert worker.requests[0].logprobs == 2
    assert [(item.logprob, item.top) for item in completion.logprobs or ()] == [(-0.5, ((THE, -0.5), (CAT, -1.5)))]
    assert completion.finish_reason is FinishReason.LENGTH


PROMPT_LOGPROBS = (None, -1.0, -2.0, -3.0)
"""Those of the prompt "the cat sat", which has no token before its first one."""


def prompt_logprobs(begin: int, end: int) -> worker_pb2.GenerateResponse:
    """A message about these tokens of the prompt; the first one has the usage too."""
    message = worker_pb2.GenerateResponse(usage=usage() if begin == 0 else None)
    for logprob in PROMPT_LOGPROBS[begin:end]:
        item = message.prompt_logprobs.add()
        if logprob is not None:
            item.logprobs.logprob = logprob
    return message


async def test_logprobs_of_the_prompt_come_before_the_tokens() -> None:
    worker = FakeWorker("w", [prompt_logprobs(0, 1), prompt_logprobs(1, 4), *answer(THE)])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        chunks = [chunk async for chunk in client.generate("the cat sat", prompt_logprobs=0)]
        plain = await client.generate("the cat sat").collect()
    assert worker.requests[0].HasField("prompt_logprobs")
    assert [len(chunk.prompt_logprobs or ()) for chunk in chunks] == [1, 3, 0, 0]
    assert plain.prompt_logprobs is None


async def test_a_worker_that_does_not_report_the_whole_prompt_is_not_believed() -> None:
    worker = FakeWorker("w", [prompt_logprobs(0, 2), *answer(THE)])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(ProtocolError, match="2 tokens of the prompt, which has 4") as caught:
            await client.generate("the cat sat", prompt_logprobs=0).collect()
    assert caught.value.reason == "LOGPROBS_MISSING"


@pytest.mark.parametrize("num_reported", range(5))
async def test_logprobs_of_the_prompt_are_delivered_once_whatever_the_first_worker_reported(num_reported: int) -> None:
    broken = FakeWorker("a", [prompt_logprobs(0, num_reported), UNAVAILABLE])
    other = FakeWorker("b", [prompt_logprobs(0, 2), prompt_logprobs(2, 4), *answer(THE)])
    async with fake_cluster(broken, other) as manager, quick(manager) as client:
        completion = await client.generate("the cat sat", prompt_logprobs=0).collect()
    assert completion.num_attempts == 2
    assert completion.prompt_logprobs is not None
    assert tuple(item and item.logprob for item in completion.prompt_logprobs) == PROMPT_LOGPROBS
