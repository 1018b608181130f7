"""Clients that leave, die or ask for nonsense: the status says what was wrong, and every block comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import pytest_asyncio
from google.protobuf import text_format

from kvpool.client import DeadlineExceeded
from kvpool.process.call_status import details_of
from kvpool.v1 import worker_pb2
from tests.cluster.cluster import Cluster
from tests.cluster.models import ENDLESS_MODEL_LEN, make_endless_model
from tests.cluster.process import Process
from tests.until import eventually, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Generate = worker_pb2.GenerateRequest
Call = grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]
Opened = Callable[..., Call]
Status = grpc.StatusCode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder = tmp_path_factory.mktemp("faults")
    model = make_endless_model(folder / "endless")
    async with Cluster(folder) as cluster:
        worker = {
            "model": model.path,
            "num_blocks": 1025,
            "max_num_waiting": 4,
            "max_num_seqs": 8,
            "step_seconds": 0.03,
        }
        await cluster.start(dict.fromkeys(("a", "b"), worker))
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: Cluster) -> AsyncIterator[Cluster]:
    """Two workers of one model without a tokenizer. Behind every test all blocks are back and every law holds."""
    yield shared
    await shared.until_clean()
    assert {worker.worker_id for worker in await shared.describe()} == {"a", "b"}


@pytest.fixture
def opened(cluster: Cluster) -> Iterator[Opened]:
    """Opens streams at the workers, as a client does that is not our library; they end with the test."""
    with contextlib.ExitStack() as ends:

        def opened(worker: str, request: Generate, timeout: float | None = None) -> Call:
            call = cluster.worker_stub(worker).Generate(request, timeout=timeout)
            ends.callback(call.cancel)
            return call

        yield opened


def good(sequence_id: str = "good") -> Generate:
    """A request that nothing is wrong with; it goes on for minutes."""
    request = Generate(sequence_id=sequence_id, attempt=1, token_ids=worker_pb2.TokenIds(ids=[1, 2, 3, 4, 5]))
    request.stop.max_tokens = 12_000
    return request


async def first_token(call: Call) -> None:
    """Until the stream has delivered a token."""
    while True:
        message = await call.read()
        assert isinstance(message, worker_pb2.GenerateResponse), f"ended early: {await call.code()}"
        if message.token_ids:
            return


async def failure(call: Call) -> grpc.aio.AioRpcError:
    """How the stream fails, which it must, soon."""
    try:
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the stream came to a proper end")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo.reason in our domain; empty where the transport answered."""
    return details_of(error).reason


class Bad(NamedTuple):
    """What is wrong with a request, in protobuf's text format, and what the worker must say to it."""

    spoil: str
    field: str
    says: str
    code: Status = Status.INVALID_ARGUMENT
    reason: str = "BAD_FIELD"


MALFORMED = [
    Bad("text: 'hello'", "prompt", "no tokenizer"),
    Bad("token_ids { ids: 264 }", "prompt", "vocabulary of 264"),
    Bad("token_ids { ids: 4294967295 }", "prompt", "vocabulary of 264"),
    Bad("token_ids {" + "ids: 1 " * ENDLESS_MODEL_LEN + "}", "prompt", str(ENDLESS_MODEL_LEN)),
    Bad(f"stop {{ max_tokens: {ENDLESS_MODEL_LEN} }}", "max_tokens", "at most 65531"),
    Bad(f"stop {{ max_tokens: {1024 * 16} }}", "max_tokens", "--num-blocks", reason="NEVER_FITS"),
    Bad("sequence_id: ''", "sequence_id", "1 to 128 bytes"),
    Bad(f"sequence_id: '{'é' * 65}'", "sequence_id", "got 130"),
    Bad("attempt: 0", "attempt", "from 1"),
    Bad("sampling { temperature: -1 }", "sampling.temperature", "got -1"),
    Bad("sampling { temperature: nan }", "sampling.temperature", "nan"),
    Bad("sampling { temperature: 101 }", "sampling.temperature", "[0, 100]"),
    Bad("sampling { top_p: 0 }", "sampling.top_p", "(0, 1]"),
    Bad("sampling { top_p: 1.5 }", "sampling.top_p", "(0, 1]"),
    Bad("sampling { min_p: -0.1 }", "sampling.min_p", "[0, 1], got -0.1"),
    Bad("sampling { min_p: 1.1 }", "sampling.min_p", "[0, 1]"),
    Bad("sampling { repetition_penalty: 0 }", "sampling.repetition_penalty", "(0, 10]"),
    Bad("sampling { repetition_penalty: 11 }", "sampling.repetition_penalty", "(0, 10]"),
    Bad("sampling { presence_penalty: 2.1 }", "sampling.presence_penalty", "[-2, 2]"),
    Bad("sampling { presence_penalty: -2.1 }", "sampling.presence_penalty", "-2.1"),
    Bad("sampling { frequency_penalty: 3 }", "sampling.frequency_penalty", "got 3"),
    Bad("sampling { logit_bias { key: 5 value: 101 } }", "sampling.logit_bias", "[-100, 100], got 101"),
    Bad("sampling { logit_bias { key: 5 value: nan } }", "sampling.logit_bias", "nan"),
    Bad("sampling { logit_bias { key: 264 value: 1 } }", "sampling.logit_bias", "vocabulary of 264"),
    Bad(
        f"sampling {{ {' '.join(f'logit_bias {{ key: {token} value: 1 }}' for token in range(1025))} }}",
        "sampling.logit_bias",
        "got 1025",
    ),
    Bad("logprobs: 21", "logprobs", "at most 20"),
    Bad("prompt_logprobs: 21", "prompt_logprobs", "at most 20"),
    Bad("adapter: 'lora-7'", "adapter", "lora-7"),
    Bad(f"tenant_salt: '{'x' * 257}'", "tenant_salt", "got 257"),
    Bad("echo: true", "echo", "no tokenizer"),
    Bad("stop { stop_strings: 'x' }", "stop.stop_strings", "no tokenizer"),
    Bad("stop { stop_strings: '' }", "stop.stop_strings", "1 to 256"),
    Bad("stop {" + "stop_strings: 'x' " * 17 + "}", "stop.stop_strings", "got 17"),
    Bad("stop {" + "stop_token_ids: 1 " * 257 + "}", "stop.stop_token_ids", "got 257"),
    Bad(
        "stop { stop_token_ids: 99999999 }",
        "stop.stop_token_ids",
        "token id 99999999 is outside the vocabulary of 264",
    ),
    Bad("stop { min_tokens: 9 max_tokens: 8 }", "stop.min_tokens", "more than the 8"),
    Bad(f"model_fingerprint: '{'f' * 64}'", "", "GetModel", Status.FAILED_PRECONDITION, "OTHER_MODEL"),
]


@pytest.mark.parametrize("bad", MALFORMED, ids=lambda bad: bad.spoil[:40])
async def test_a_malformed_request_is_told_what_is_wrong_with_it(cluster: Cluster, opened: Opened, bad: Bad) -> None:
    error = await failure(opened("a", text_format.Merge(bad.spoil, good())))
    assert (error.code(), reason_of(error)) == (bad.code, bad.reason), error
    assert [violation.partition(":")[0] for violation in details_of(error).violations] == [bad.field] * bool(bad.field)
    assert bad.says in (error.details() or "")


async def test_a_request_without_a_prompt_is_told_so(cluster: Cluster, opened: Opened) -> None:
    empty, none = good(), good()
    del empty.token_ids.ids[:]
    none.ClearField("token_ids")
    for request, says in ((empty, "at least one token"), (none, "text or token_ids")):
        error = await failure(opened("a", request))
        assert (error.code(), reason_of(error)) == (Status.INVALID_ARGUMENT, "BAD_FIELD")
        assert details_of(error).violations[0].startswith("prompt: ")
        assert says in (error.details() or "")


async def test_an_oversize_request_is_refused_by_the_transport_and_harms_nobody(
    cluster: Cluster, opened: Opened
) -> None:
    request = good()
    request.token_ids.ids.extend([200] * (9 << 20))
    error = await failure(opened("a", request))
    assert (error.code(), reason_of(error)) == (Status.RESOURCE_EXHAUSTED, "")
    await first_token(opened("a", good()))


async def test_a_second_stream_of_an_attempt_already_exists_and_the_first_goes_on(
    cluster: Cluster, opened: Opened
) -> None:
    first = opened("a", good())
    await first_token(first)
    error = await failure(opened("a", good()))
    assert (error.code(), reason_of(error)) == (Status.ALREADY_EXISTS, "STREAM_EXISTS")
    assert "'good'" in (error.details() or "")
    error = await failure(opened("b", good()))
    assert (error.code(), reason_of(error)) == (Status.ALREADY_EXISTS, "SEQUENCE_ELSEWHERE")
    await first_token(first)


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_larger_attempt_fences_the_smaller_one_anywhere(cluster: Cluster, opened: Opened, name: str) -> None:
    first = opened("a", good())
    await first_token(first)
    request = good()
    request.attempt = 2
    second = opened(name, request)
    await first_token(second)
    errors = [await failure(first)]
    errors += [await failure(opened(worker, good())) for worker in ("a", "b")]
    for error in errors:
        assert (error.code(), reason_of(error)) == (Status.FAILED_PRECONDITION, "STALE_ATTEMPT")
    await first_token(second)


async def test_a_client_that_cancels_in_mid_stream_gives_everything_back(cluster: Cluster, opened: Opened) -> None:
    calls: list[Call] = []
    for batch in range(3):
        calls += [opened("a", good(f"cancelled-{batch}-{index}")) for index in range(4)]
        if batch < 2:
            await asyncio.gather(*map(first_token, calls[-4:]))
    (counts,) = (await cluster.worker("a")).counts
    assert counts.held >= 8
    for call in calls:
        call.cancel()
    await cluster.until_clean()


async def test_more_requests_than_may_wait_are_told_to_come_back(cluster: Cluster, opened: Opened) -> None:
    for batch in range(2):
        running = [opened("a", good(f"crowd-{batch}-{index}")) for index in range(4)]
        await asyncio.gather(*map(first_token, running))
    waiting = [opened("a", good(f"crowd-waits-{index}")) for index in range(4)]

    async def turned_away() -> grpc.aio.AioRpcError | None:
        call = opened("a", good("one-too-many"), timeout=0.5)
        error = await failure(call)
        return None if error.code() is Status.DEADLINE_EXCEEDED else error

    error = await eventually(turned_away, "the queue is full")
    assert (error.code(), reason_of(error)) == (Status.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert details_of(error).retry_seconds is not None
    of_another_tenant = good("of-another-tenant")
    of_another_tenant.tenant = "other"
    opened("a", of_another_tenant)
    ends = [asyncio.create_task(failure(call)) for call in waiting]
    sent_away, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert [reason_of(end.result()) for end in sent_away] == ["QUEUE_FULL"]
    for end in others:
        end.cancel()
    await first_token(running[0])


async def test_a_deadline_in_mid_stream_gives_everything_back(cluster: Cluster, opened: Opened) -> None:
    call = opened("a", good(), timeout=2.0)
    await first_token(call)
    assert (await failure(call)).code() is Status.DEADLINE_EXCEEDED
    await cluster.until_clean()
    async with cluster.client() as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate([1, 2, 3], max_tokens=12_000, timeout=0.5).collect()


CLIENT_SCRIPT = """
import sys
from kvpool.client import SyncClient

with SyncClient(sys.argv[1]) as client:
    for chunk in client.generate([7, 7, 7], max_tokens=12_000):
        if chunk.token_ids:
            print("token", flush=True)
"""


async def test_a_client_killed_in_mid_stream_gives_everything_back(cluster: Cluster, tmp_path: Path) -> None:
    process = Process("client", ["-c", CLIENT_SCRIPT, cluster.address()], tmp_path / "client.log", {})
    try:
        await until(lambda: "token" in process.log or process.status is not None, pause=0.02)
        assert process.status is None, process.log
        assert any(counts.held for worker in await cluster.describe() for counts in worker.counts)
    finally:
        process.kill()
    await cluster.until_clean()


async def test_a_storm_of_everything_leaves_nothing_behind(cluster: Cluster, opened: Opened) -> None:
    async def one(index: int) -> None:
        request = good(f"storm-{index}")
        request.stop.max_tokens = 40
        if index % 5 == 0:
            text_format.Merge(MALFORMED[index // 5 % len(MALFORMED)].spoil, request)
        call = opened("ab"[index % 2], request, timeout=0.2 if index % 5 == 1 else 30.0)
        if index % 5 == 2:
            await asyncio.sleep(0.01 * (index % 7))
            call.cancel()
        # CancelledError is what grpc.aio raises to the one who cancelled.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for _ in call:
                pass

    await asyncio.gather(*(one(index) for index in range(100)))
    await cluster.until_clean()
