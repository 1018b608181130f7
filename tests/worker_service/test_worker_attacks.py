"""What a peer may send to a worker's port without harm to others, over real gRPC, with a real manager and a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import structlog

from kvpool.client import Client, ResourceExhausted
from kvpool.process.call_status import details_of
from kvpool.protocol.text_bound import TextBound
from kvpool.v1 import worker_pb2
from kvpool.worker_service.engine.errors import ErrorKind
from kvpool.worker_service.servicer import SERVICE, request_limits
from tests import http2
from tests.attacks import at_worker
from tests.attacks.at_manager import NO_MESSAGE
from tests.cluster.cluster import TAKES_TIME
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.truth import Truth
from tests.tiny_models import Oracle, TinyModel
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE = f"/{SERVICE}/Generate".encode()
MAX_MODEL_LEN = 2048
READER_SECONDS = 0.5
SETTINGS = {"max_model_len": MAX_MODEL_LEN, "num_blocks": 1025, "reader_seconds": READER_SECONDS}


def request(sequence_id: str, max_tokens: int = 1000, **fields: Any) -> worker_pb2.GenerateRequest:
    """A good one, for a text that no token ends."""
    asked = worker_pb2.GenerateRequest(
        sequence_id=sequence_id, attempt=1, token_ids=worker_pb2.TokenIds(ids=[1, 2, 3, 4, 5]), **fields
    )
    asked.stop.max_tokens = max_tokens
    asked.stop.ignore_eos = True
    return asked


async def outcome(cluster: InProcessCluster, name: str) -> None:
    """Wait until a request has ended so."""
    ended = cluster.worker.engine.stats.ended
    await until(lambda: ended[name])
    ended.clear()


async def with_window(cluster: InProcessCluster, num_bytes: int) -> http2.Connection:
    """A connection to the worker that takes so many bytes of each stream until it opens its window further."""
    return await http2.Connection.open(cluster.worker.port, own_settings={http2.Setting.INITIAL_WINDOW_SIZE: num_bytes})


# -- malformed paths


async def bad_paths(cluster: InProcessCluster) -> list[http2.Connection]:
    """Send some to both services, and wait until each has met its end."""
    connections = []
    for port in (cluster.worker.port, cluster.manager.port):
        connections.append(await http2.Connection.open(port))
        asked = {await connections[-1].request(b"/\xff") for _ in range(5)}
        async with asyncio.timeout(30):
            while asked and (frame := await connections[-1].read()) is not None:
                if frame.kind in (http2.Kind.HEADERS, http2.Kind.RST_STREAM):
                    asked.discard(frame.stream)
    return connections


async def test_a_stream_in_flight_comes_to_its_right_end_after_bad_paths(
    loop_of_grpcio: None, model: TinyModel, tmp_path: Path
) -> None:
    """Its text is that of transformers, it is one attempt, the session is the same, and new requests are served on the same ports,
    although both servers end and are replaced. With our own serving loop they do not end: tests/hostile."""
    async with in_process_cluster(
        model.path, tmp_path, max_model_len=MAX_MODEL_LEN, num_blocks=1025, **TAKES_TIME
    ) as cluster:
        prompt, num_tokens = model.prompts[0], 60
        truth = Truth.of(Oracle.of(model.path), prompt, 8)
        undisturbed = await cluster.complete(prompt, max_tokens=num_tokens)
        session = cluster.worker.engine.cache.session
        stream = cluster.client.generate(prompt, max_tokens=num_tokens, ignore_eos=True)
        chunks = [await anext(stream)]
        connections = await bad_paths(cluster)
        await until(lambda: cluster.worker._grpc.num_rebuilds and cluster.manager._grpc.num_rebuilds)
        chunks += [chunk async for chunk in stream]
        for connection in connections:
            await connection.__aexit__(None, None, None)
        found = [token for chunk in chunks for token in chunk.token_ids]
        assert found == list(undisturbed.token_ids)
        assert found[:8] == truth.tokens
        assert {chunk.attempt for chunk in chunks} == {1}
        assert cluster.worker.engine.cache.session == session
        async with Client(f"127.0.0.1:{cluster.manager.port}") as fresh:
            again = await fresh.generate(prompt, max_tokens=num_tokens, ignore_eos=True).collect()
        assert list(again.token_ids) == list(undisturbed.token_ids)
        assert again.num_cached_tokens > 0
        await cluster.until_idle()
        assert cluster.manager.manager.check().violations == []


# -- before protobuf


@pytest_asyncio.fixture(loop_scope="module")
async def channel(cluster: InProcessCluster) -> AsyncIterator[Any]:
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.worker.port}", options=options) as channel:
        yield channel


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and message of a call that fails, which it must, with its rich status."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert details_of(caught.value).reason
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize("attack", at_worker.ALL, ids=str)
async def test_a_message_of_a_stranger_is_refused(channel: Any, attack: at_worker.Attack) -> None:
    """What was sent, what is allowed, and which setting decides."""
    code, message = await refusal(channel.unary_unary(attack.path)(attack.payload()))
    assert code is attack.code
    assert all(word in message for word in attack.words)


async def test_bytes_that_are_no_message_are_counted_and_one_line(cluster: InProcessCluster, channel: Any) -> None:
    """However many there are; a method that generates nothing counts no request."""
    cluster.worker._grpc._refused_line._quiet_until = 0.0
    refused = cluster.worker.engine.stats.refused
    before = refused[ErrorKind.INVALID]
    with structlog.testing.capture_logs() as logged:
        for method in ("Generate", "GetModel"):
            for _ in range(10):
                await refusal(channel.unary_unary(f"/{SERVICE}/{method}")(NO_MESSAGE[0]))
    assert len(logged) == 1
    assert refused[ErrorKind.INVALID] == before + 10


async def test_every_method_has_a_limit_of_its_own() -> None:
    """A new one is to be thought about: what is the largest request that is legal?"""
    assert request_limits(2048, 264, TextBound(0)).keys() == set(at_worker.PATHS)


async def test_the_largest_legal_request_is_taken(cluster: InProcessCluster, channel: Any) -> None:
    """Every field at its limit, the prompt of the largest ids, one tag for each."""
    asked = request("s" * 128, max_tokens=1, tenant="t" * 256, tenant_salt="u" * 256)
    asked.model_fingerprint = cluster.worker.facts.model_fingerprint
    asked.token_ids.ids[:] = [263] * (MAX_MODEL_LEN - 1)
    asked.sampling.CopyFrom(
        worker_pb2.SamplingParams(
            temperature=1, top_k=5, top_p=0.5, seed=(1 << 64) - 1, min_p=0.1, repetition_penalty=1.5
        )
    )
    for token in range(264):
        asked.sampling.logit_bias[token] = -1.5
    asked.stop.stop_strings.extend(["é" * 128] * 16)
    asked.stop.stop_token_ids.extend(range(256))
    asked.logprobs = asked.prompt_logprobs = 20
    call = channel.unary_stream(GENERATE.decode())(asked.SerializeToString())
    messages = [worker_pb2.GenerateResponse.FromString(raw) async for raw in call]
    assert messages[-1].finish_reason
    assert sum(len(message.prompt_logprobs) for message in messages) == MAX_MODEL_LEN - 1


# -- readers that do not read


async def test_a_reader_without_a_window_is_given_up_and_its_blocks_come_back(cluster: InProcessCluster) -> None:
    """No DATA may be sent to it, so its first token waits. When it opens its window it gets the status, after what waited."""
    async with await with_window(cluster, 0) as connection:
        stream = await connection.request(GENERATE, request("slow").SerializeToString())
        await outcome(cluster, "slow_reader")
        await cluster.until_idle()  # while the stream is still open
        assert cluster.worker._grpc._life is not None
        assert cluster.worker._grpc._life.guard.num_calls == 1
        await connection.open_window(1 << 20, stream)
        while (frame := await connection.read()) is not None:
            if frame.stream == stream and frame.kind == http2.Kind.HEADERS and frame.flags & http2.Flag.END_STREAM:
                assert b"took nothing for" in frame.payload
                assert b"--reader-seconds" in frame.payload
                return
        pytest.fail("the stream has no end")


async def test_a_reader_that_takes_the_first_tokens_only_is_given_up(cluster: InProcessCluster) -> None:
    """A window of one message or so: some is taken, then nothing."""
    async with await with_window(cluster, 300) as connection:
        await connection.request(GENERATE, request("some", logprobs=20).SerializeToString())
        await outcome(cluster, "slow_reader")


async def test_a_reader_that_is_slow_but_reads_gets_everything(cluster: InProcessCluster) -> None:
    """It never lets more than 700 bytes come before it has looked at them, which it does for longer than the limit."""
    async with await with_window(cluster, 700) as connection:
        stream = await connection.request(GENERATE, request("steady", max_tokens=150, logprobs=1).SerializeToString())
        data = bytearray()

        async def receive() -> None:
            while (frame := await connection.read()) is not None:
                if frame.stream == stream and frame.kind == http2.Kind.DATA:
                    data.extend(frame.payload)
                if frame.stream == stream and frame.kind == http2.Kind.HEADERS and frame.flags & http2.Flag.END_STREAM:
                    return

        receiving = asyncio.create_task(receive())
        num_seen = 0
        async with asyncio.timeout(60):
            while not receiving.done():
                await asyncio.sleep(READER_SECONDS / 10)
                if len(data) > num_seen:
                    num_new, num_seen = len(data) - num_seen, len(data)
                    await connection.open_window(num_new, stream)
        tokens: list[int] = []
        while data:
            size = int.from_bytes(data[1:5])
            tokens += worker_pb2.GenerateResponse.FromString(bytes(data[5 : 5 + size])).token_ids
            del data[: 5 + size]
        assert len(tokens) == 150
    assert not cluster.worker.engine.stats.ended["slow_reader"]


async def test_a_request_that_waits_for_blocks_has_no_slow_reader(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to read yet, for several times the limit: that its reader has no window does not matter until there is."""
    scheduler = cluster.worker.engine.scheduler
    monkeypatch.setattr(scheduler, "candidates", lambda *_: [])
    async with await with_window(cluster, 0) as connection:
        await connection.request(GENERATE, request("patient").SerializeToString())
        await asyncio.sleep(3 * READER_SECONDS)
        assert scheduler.num_waiting == 1
        assert not cluster.worker.engine.stats.ended
        monkeypatch.undo()
        cluster.worker.engine.changed_for_link.set()
        await outcome(cluster, "slow_reader")


async def test_our_client_does_not_go_on_elsewhere_for_a_reader_that_does_not_read(cluster: InProcessCluster) -> None:
    """One attempt, then the worker's reason. The window is the client's own, so the worker is made to see a slow reader."""
    stream = cluster.client.generate([1, 2, 3], max_tokens=1500, ignore_eos=True)
    await anext(stream)
    (running,) = list(cluster.worker.engine.scheduler)
    cluster.worker.engine.give_up_reader(running, READER_SECONDS)
    with pytest.raises(ResourceExhausted) as caught:
        await stream.collect()
    assert caught.value.reason == "SLOW_READER"
    assert "read faster" in str(caught.value)
    assert cluster.worker.engine.stats.ended["slow_reader"] == 1
    assert running.params.attempt == 1
