"""generate() and chat(): from the prompt to the last token, over the workers that the manager ranks."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2
from kvpool.v1 import worker_pb2

from client import (
    Cancelled,
    Client,
    ClientConfig,
    Completion,
    DeadlineExceeded,
    FailedPrecondition,
    FinishReason,
    InvalidRequest,
    NotFound,
    ProtocolError,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from tests.client.fakes import (
    ASSISTANT,
    BOS,
    CAT,
    HANG,
    SAT,
    THE,
    UNAVAILABLE,
    USER,
    FakeManager,
    FakeModel,
    FakeWorker,
    answer,
    error_status,
    fake_cluster,
    serving,
    usage,
)


def quick(manager: FakeManager, **settings: Any) -> Client:
    """A client that does not wait long for what will not come."""
    config = ClientConfig(manager=manager.address, first_contact=0.3, worker_wait=0.3, liveness_interval=0.1)
    return Client(config=replace(config, **settings))


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def test_chunks_arrive_in_order_and_collect_puts_them_together() -> None:
    """Every token stands once, at its place; collect() also returns what was already taken."""
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
        worker_id="w",
        time_to_first_token_ms=completion.time_to_first_token_ms,
        logprobs=None,
        num_preemptions=0,
        num_attempts=1,
    )
    assert worker.requests[0].stop.max_tokens == 9


async def test_the_prompt_is_tokenised_here_and_routed_under_its_root() -> None:
    """The worker gets ids, with the special tokens that the tokenizer adds and without its cutting and padding; the
    manager gets the same ids and the whole namespace, so that tenants do not meet."""
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
    """Special tokens in the rendered text are special tokens, and the tokenizer adds none of its own."""
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await client.chat([{"role": "user", "content": "the cat"}]).collect()
    assert list(worker.requests[0].token_ids.ids) == [BOS, USER, THE, CAT, ASSISTANT]


async def test_a_prompt_of_token_ids_needs_no_tokenizer() -> None:
    """A model folder without a tokenizer is talked to in ids; text and chat are refused with the way out."""
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


async def test_the_model_is_fetched_once() -> None:
    """Sixteen requests at once fetch one tokenizer; later ones ask for nothing but Route and Generate."""
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await asyncio.gather(*(client.generate("the").collect() for _ in range(16)))
        await client.generate("the").collect()
    assert worker.num_model_calls == 1
    assert len(manager.describes) == 1
    assert len({request.sequence_id for request in worker.requests}) == 17


async def test_a_file_that_does_not_match_its_digest_is_not_believed() -> None:
    worker = FakeWorker("w", model=FakeModel(is_corrupt=True))
    async with fake_cluster(worker) as manager, quick(manager) as client:
        with pytest.raises(ProtocolError) as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "DIGEST_MISMATCH"
    assert not worker.requests


async def test_a_draining_worker_is_passed_over_with_a_larger_attempt() -> None:
    """The next ranked worker gets the same sequence under attempt 2, so that the first can never come back into it."""
    first, second = FakeWorker("w1", [UNAVAILABLE]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        completion = await client.generate("the", temperature=1.0).collect()
    assert (completion.worker_id, completion.num_attempts) == ("w2", 2)
    (one,), (two,) = first.requests, second.requests
    assert (one.sequence_id, one.attempt, two.attempt) == (two.sequence_id, 1, 2)
    assert one.sampling.seed == two.sampling.seed != 0
    assert len(manager.routes) == 1


async def test_a_dead_worker_is_passed_over() -> None:
    """Nobody listens at its address any more, but its lease still runs."""
    dead, live = FakeWorker("dead"), FakeWorker("live")
    async with fake_cluster(live) as manager, quick(manager) as client:
        dead.address = free_address()
        manager.workers = [dead, live]
        completion = await client.generate("the").collect()
    assert completion.worker_id == "live"


async def test_a_worker_that_fails_between_usage_and_the_first_token_is_passed_over() -> None:
    admitted = worker_pb2.GenerateResponse(usage=usage())
    first, second = FakeWorker("w1", [admitted, UNAVAILABLE]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        completion = await client.generate("the").collect()
    assert (completion.worker_id, completion.token_ids) == ("w2", (THE, CAT, SAT))


async def test_a_frozen_worker_is_passed_over_when_its_lease_has_ended() -> None:
    """It took the stream and says nothing: it looks like a busy one until the manager no longer knows it."""
    frozen, live = FakeWorker("frozen", [HANG]), FakeWorker("live")
    async with fake_cluster(frozen, live) as manager, quick(manager) as client:
        task = asyncio.create_task(client.generate("the").collect())
        await asyncio.sleep(0.5)
        assert not task.done(), "a busy worker with a lease was given up"
        manager.workers = [live]
        completion = await asyncio.wait_for(task, 5)
        assert completion.worker_id == "live"
        await asyncio.wait_for(frozen.cancelled.wait(), 5)


async def test_when_nobody_answers_the_error_tells_what_each_one_said() -> None:
    """Ranked twice, each worker asked twice, then an end: never an endless search."""
    first = FakeWorker("w1", [error_status(code_pb2.UNAVAILABLE, "DRAINING", "I am draining")])
    second = FakeWorker("w2", [error_status(code_pb2.UNAVAILABLE, "RECOVERING", "I am recovering")])
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("the").collect()
    assert "I am draining" in str(caught.value)
    assert "I am recovering" in str(caught.value)
    assert [request.attempt for request in first.requests] == [1, 3]
    assert [request.attempt for request in second.requests] == [2, 4]
    assert len(manager.routes) == 2


async def test_a_full_worker_is_passed_over() -> None:
    full = error_status(code_pb2.RESOURCE_EXHAUSTED, "BUSY", "queue full")
    async with fake_cluster(FakeWorker("w1", [full]), FakeWorker("w2")) as manager, quick(manager) as client:
        assert (await client.generate("the").collect()).worker_id == "w2"


async def test_when_all_are_full_the_error_says_when_to_come_back() -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=2, nanos=500_000_000))
    full = error_status(code_pb2.RESOURCE_EXHAUSTED, "BUSY", "queue full", retry)
    async with fake_cluster(FakeWorker("w1", [full])) as manager, quick(manager) as client:
        with pytest.raises(ResourceExhausted) as caught:
            await client.generate("the").collect()
    assert (caught.value.reason, caught.value.retry_after) == ("BUSY", 2.5)


@pytest.mark.parametrize(
    ("code", "exception"),
    [
        (code_pb2.INVALID_ARGUMENT, InvalidRequest),
        (code_pb2.FAILED_PRECONDITION, FailedPrecondition),
        (code_pb2.INTERNAL, ServiceError),
        (code_pb2.CANCELLED, Cancelled),
    ],
)
async def test_an_error_that_another_worker_would_repeat_is_raised_at_once(
    code: int, exception: type[Exception]
) -> None:
    first, second = FakeWorker("w1", [error_status(code, "NO", "no")]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        with pytest.raises(exception):
            await client.generate("the").collect()
    assert not second.requests


async def test_a_failure_behind_the_first_token_is_raised() -> None:
    """No silent restart: the tokens delivered stay delivered, the error says who failed."""
    first, second = FakeWorker("w1", [*answer(THE)[:1], UNAVAILABLE]), FakeWorker("w2")
    async with fake_cluster(first, second) as manager, quick(manager) as client:
        stream = client.generate("the")
        assert (await anext(stream)).token_ids == (THE,)
        with pytest.raises(Unavailable, match="w1"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert not second.requests


@pytest.mark.parametrize("start_index", [0, 2])
async def test_tokens_out_of_place_are_not_taken(start_index: int) -> None:
    """A token twice, or a hole, ends the stream with an error instead of a wrong text."""
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


async def test_leaving_the_block_cancels_the_call() -> None:
    """The worker learns at once that nobody reads on, and frees the blocks."""
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        async with client.generate("the") as stream:
            await anext(stream)
            assert worker.num_live == 1
        await asyncio.wait_for(worker.cancelled.wait(), 5)
        assert worker.num_live == 0


async def test_a_stream_that_is_dropped_cancels_its_call() -> None:
    """Also without the block: breaking out of a loop leaves nothing behind."""
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        async for _ in client.generate("the"):
            break
        await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_cancelling_the_task_cancels_the_call() -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        task = asyncio.create_task(client.generate("the").collect())
        await worker.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(worker.cancelled.wait(), 5)


async def test_the_timeout_counts_from_the_start_of_the_call() -> None:
    worker = FakeWorker("w", [answer(THE)[0], HANG])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"time-out of 0.5 s .* 1 tokens"):
            await client.generate("the", timeout=0.5).collect()
        assert 0.4 < time.monotonic() - started < 3


async def test_a_manager_that_restarts_is_waited_for() -> None:
    """Route is repeated: while it recovers, and while nobody listens on its port."""
    worker = FakeWorker("w")
    manager = FakeManager([worker])
    async with serving(worker), AsyncExitStack() as first_life:
        await first_life.enter_async_context(serving(manager))
        async with quick(manager) as client:
            manager.route_errors.append(error_status(code_pb2.UNAVAILABLE, "RECOVERING", "recovering"))
            await client.generate("the").collect()
            await first_life.aclose()
            task = asyncio.create_task(client.generate("the", timeout=20).collect())
            await asyncio.sleep(0.7)
            assert not task.done()
            async with serving(manager, port=int(manager.address.rpartition(":")[2])):
                started = time.monotonic()
                await task
                assert time.monotonic() - started < 5


async def test_a_manager_that_never_was_there_is_told_at_once() -> None:
    async with Client(config=ClientConfig(manager=free_address(), first_contact=0.3)) as client:
        started = time.monotonic()
        with pytest.raises(Unavailable, match="kvpool up") as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "NO_MANAGER"
    assert time.monotonic() - started < 3


async def test_workers_that_register_late_are_waited_for() -> None:
    """After a restart the manager knows nobody for a moment; a request in that moment is served all the same."""
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager, worker_wait=5.0) as client:
        manager.workers = []
        task = asyncio.create_task(client.generate("the").collect())
        await asyncio.sleep(0.5)
        manager.workers = [worker]
        assert (await task).worker_id == "w"


async def test_without_any_worker_the_error_says_so() -> None:
    async with fake_cluster() as manager, quick(manager) as client:
        with pytest.raises(Unavailable, match="no live worker") as caught:
            await client.generate("the").collect()
    assert caught.value.reason == "NO_WORKER"


async def test_new_weights_behind_the_same_name_are_noticed() -> None:
    """The workers come back with another fingerprint: the client finds it out and tokenises for it."""
    worker = FakeWorker("w")
    async with fake_cluster(worker) as manager, quick(manager) as client:
        await client.generate("the").collect()
        worker.model = FakeModel(fingerprint="fp-other")
        await client.generate("the").collect()
    assert [request.model_fingerprint for request in worker.requests] == ["fp-tiny", "fp-other"]


async def test_among_several_models_one_must_be_named() -> None:
    one, two = FakeWorker("w1"), FakeWorker("w2", model=FakeModel(name="big", fingerprint="fp-big"))
    async with fake_cluster(one, two) as manager, quick(manager) as client:
        with pytest.raises(InvalidRequest, match="big"):
            await client.generate("the").collect()
        with pytest.raises(NotFound, match="huge"):
            await client.generate("the", model="huge").collect()
        assert (await client.generate("the", model="big").collect()).worker_id == "w2"
        assert (await client.generate("the", model="fp-tiny").collect()).worker_id == "w1"


async def test_logprobs_come_with_their_tokens() -> None:
    message = worker_pb2.GenerateResponse(
        token_ids=[THE], text=" the", usage=usage(), finish_reason=worker_pb2.FINISH_REASON_LENGTH
    )
    message.logprobs.add(logprob=-0.5, top_token_ids=[THE, CAT], top_logprobs=[-0.5, -1.5])
    worker = FakeWorker("w", [message])
    async with fake_cluster(worker) as manager, quick(manager) as client:
        completion = await client.generate("the", logprobs=2).collect()
    assert worker.requests[0].logprobs == 2
    assert completion.logprobs is not None
    assert completion.logprobs[0].logprob == -0.5
    assert completion.logprobs[0].top == ((THE, -0.5), (CAT, -1.5))
    assert completion.finish_reason is FinishReason.LENGTH


async def test_an_address_off_this_machine_is_refused_unless_allowed() -> None:
    """The channel is not encrypted."""
    async with Client("192.0.2.1:50051") as client:
        with pytest.raises(InvalidRequest, match="not encrypted"):
            await client.describe()
