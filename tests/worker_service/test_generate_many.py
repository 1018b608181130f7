"""GenerateMany: many requests over one stream, over real gRPC, with a real manager and a tiny model."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2

from kvpool.process.call_status import details_of
from kvpool.protocol.status import reason_of
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.worker_service.engine.errors import EngineError, ErrorKind
from kvpool.worker_service.engine.request import Request
from kvpool.worker_service.engine.stream import EndReason, StreamChunk, TokenStream
from kvpool.worker_service.generate_many import MESSAGE_BYTES, RequestGroup
from kvpool.worker_service.servicer import SERVICE
from kvpool.worker_service.step import RowLogprobs, SampledToken
from tests import http2
from tests.cluster.in_process import InProcessCluster
from tests.until import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATE_MANY = f"/{SERVICE}/GenerateMany"
PROMPT_IDS = [1, 2, 3, 4, 5]
LONG = 1000
SETTINGS = {"max_model_len": 2048, "num_blocks": 2049, "reader_seconds": 1.0}


@asynccontextmanager
async def stream(cluster: InProcessCluster) -> AsyncIterator[Any]:
    """A GenerateMany call without a message yet."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.worker.port}") as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel).GenerateMany(timeout=60)


def start(number: int, max_tokens: int, **fields: Any) -> worker_pb2.GenerateManyRequest:
    asked = worker_pb2.GenerateRequest(
        sequence_id=f"request {number}",
        attempt=1,
        token_ids=worker_pb2.TokenIds(ids=[number % 200, *PROMPT_IDS]),
        stop=worker_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )
    return worker_pb2.GenerateManyRequest(number=number, start=asked)


def cancel(number: int) -> worker_pb2.GenerateManyRequest:
    return worker_pb2.GenerateManyRequest(number=number, cancel=worker_pb2.Cancel())


class Answers:
    """What a stream has brought."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ended: set[int] = set()
        self.statuses: dict[int, Any] = {}
        self.largest_message = 0

    def take(self, message: worker_pb2.GenerateManyResponse) -> None:
        self.largest_message = max(self.largest_message, len({answer.number for answer in message.answers}))
        for answer in message.answers:
            assert answer.number not in self.ended, "an answer follows the last one"
            if answer.HasField("status"):
                self.statuses[answer.number] = answer.status
                self.ended.add(answer.number)
            else:
                assert answer.response.start_index == len(self.tokens[answer.number])
                self.tokens[answer.number] += answer.response.token_ids
                if answer.response.finish_reason:
                    self.ended.add(answer.number)

    async def read(self, call: Any) -> None:
        """To the end of the stream."""
        while (message := await call.read()) is not grpc.aio.EOF:
            self.take(message)

    @classmethod
    async def to(cls, cluster: InProcessCluster, *requests: worker_pb2.GenerateManyRequest) -> Answers:
        """All that comes on a stream of these requests, which must end well."""
        answers = cls()
        async with stream(cluster) as call:
            for request in requests:
                await call.write(request)
            await call.done_writing()
            await answers.read(call)
            assert await call.code() is grpc.StatusCode.OK
        return answers


# -- answers


async def test_each_request_gets_the_text_that_it_gets_alone_and_a_message_holds_several(
    cluster: InProcessCluster,
) -> None:
    """The stream ends, OK, when the caller has closed its side and the last request has ended."""
    lengths = {number: 5 + number for number in range(1, 9)}
    answers = await Answers.to(cluster, *(start(number, length) for number, length in lengths.items()))
    assert answers.ended == set(lengths)
    assert answers.largest_message > 1
    for number, length in lengths.items():
        alone = await cluster.complete([number, *PROMPT_IDS], max_tokens=length)
        assert tuple(answers.tokens[number]) == alone.token_ids


async def test_cancelling_one_request_leaves_the_others(cluster: InProcessCluster) -> None:
    """Its blocks come back although the stream continues; a cancel for a request that has ended has no effect."""
    answers = Answers()
    async with stream(cluster) as call:
        await call.write(start(1, LONG))
        await call.write(start(2, num_tokens := 100))
        while not (answers.tokens[1] and answers.tokens[2]):
            answers.take(await call.read())
        await call.write(cancel(1))
        await until(lambda: cluster.worker.engine.stats.ended["cancelled"] == 1)
        await call.write(cancel(1))
        await call.write(cancel(77))
        await call.done_writing()
        await answers.read(call)
    assert len(answers.tokens[1]) < LONG
    assert len(answers.tokens[2]) == num_tokens
    assert answers.ended == {2}


async def test_a_refused_request_gets_a_status_and_the_others_their_texts(cluster: InProcessCluster) -> None:
    answers = await Answers.to(cluster, start(1, 10), start(2, 1 << 20), start(3, 10))
    assert answers.ended == {1, 2, 3}
    assert {number: reason_of(status) for number, status in answers.statuses.items()} == {2: "BAD_FIELD"}
    assert answers.statuses[2].code == code_pb2.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_number_that_is_not_larger_ends_the_stream_and_its_requests(
    cluster: InProcessCluster, number: int
) -> None:
    async with stream(cluster) as call:
        await call.write(start(2, LONG))
        await call.read()
        await call.write(start(number, 5))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Answers().read(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(caught.value).violations[0].startswith("number: ")
    assert cluster.worker.engine.stats.ended["cancelled"] == 1


async def test_a_message_that_is_none_ends_the_stream_and_its_requests(cluster: InProcessCluster) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.worker.port}") as channel:
        call: Any = channel.stream_stream(GENERATE_MANY)(timeout=60)
        await call.write(start(1, LONG).SerializeToString())
        await call.read()
        await call.write(b"\x0a\x04\xff\xfe")
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 - the stream fails in one of these reads
            while await call.read() is not grpc.aio.EOF:
                pass
    assert details_of(caught.value).reason == "MALFORMED"
    assert cluster.worker.engine.stats.ended["cancelled"] == 1


async def test_a_reader_that_takes_nothing_loses_all_its_requests(cluster: InProcessCluster) -> None:
    """They share a stream, so none can be read without the others."""
    connecting = http2.Connection.open(cluster.worker.port, own_settings={http2.Setting.INITIAL_WINDOW_SIZE: 0})
    async with await connecting as connection:
        messages = b"".join(http2.message(start(number, LONG).SerializeToString()) for number in (1, 2, 3))
        head = http2.headers(http2.request_headers(GENERATE_MANY.encode()), 1)
        await connection.send(head, http2.data(messages, 1))
        await until(lambda: cluster.worker.engine.stats.ended["slow_reader"] == 3)
        await cluster.until_idle()  # while the stream is still open


# -- one group, without a worker


class Caller:
    """Begins requests without an engine, and the messages of their caller."""

    made: ClassVar[list[Caller]] = []

    def __init__(self, max_requests: int = 4096) -> None:
        self.begun: list[Any] = []
        """All that a group sees of a request is its stream."""
        self.aborted: list[Any] = []
        self.messages: asyncio.Queue[worker_pb2.GenerateManyRequest] = asyncio.Queue()
        self.group = RequestGroup(self._begin, self.aborted.append, max_requests)
        self.group.read(self._messages())
        self.made.append(self)

    async def _begin(self, message: worker_pb2.GenerateRequest) -> Request:
        if message.stop.max_tokens == 0:
            raise EngineError(ErrorKind.BUSY, "full")
        self.begun.append(SimpleNamespace(stream=TokenStream(max(1, message.n))))
        return self.begun[-1]  # type: ignore[no-any-return]

    async def _messages(self) -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        while True:
            yield await self.messages.get()

    async def answers(self) -> list[worker_pb2.Answer]:
        """Those of the next message."""
        message = await self.group.next_message()
        assert message is not None
        return list(message.answers)

    @classmethod
    async def of(cls, *numbers: int, max_requests: int = 4096) -> Caller:
        """One whose requests have begun."""
        caller = cls(max_requests)
        caller.start(*numbers)
        await caller.has_begun(len(numbers))
        return caller

    async def numbers(self) -> list[int]:
        """Those of the next message's answers."""
        return [answer.number for answer in await self.answers()]

    async def has_begun(self, count: int) -> None:
        """Wait until so many requests have begun."""
        await until(lambda: len(self.begun) == count)

    def start(self, *numbers: int, max_tokens: int = 9) -> None:
        for number in numbers:
            self.messages.put_nowait(start(number, max_tokens))


@pytest.fixture(autouse=True)
def callers_leave() -> Iterator[None]:
    """With the test."""
    yield
    while Caller.made:
        Caller.made.pop().group.end()


LAST = StreamChunk(0, finish_reason=EndReason.STOP)


async def test_no_more_is_read_than_there_is_room_for() -> None:
    """Neither while requests run, nor while refusals wait for the caller to take them."""
    caller = Caller(max_requests=2)
    caller.start(1, 2, 3, 4)
    await caller.has_begun(2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(caller.begun) == 2
    caller.begun[0].stream.put(LAST)
    assert await caller.numbers() == [1]
    await caller.has_begun(3)
    caller.start(*range(5, 10), max_tokens=0)
    caller.begun[1].stream.put(LAST)
    caller.begun[2].stream.put(LAST)
    await caller.answers()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(caller.begun) == 4
    assert caller.messages.qsize() == 3


async def test_a_cancel_makes_room() -> None:
    caller = await Caller.of(1, max_requests=1)
    caller.messages.put_nowait(cancel(1))
    caller.start(2)
    await caller.has_begun(2)
    assert caller.aborted == caller.begun[:1]


async def test_much_is_sent_in_several_messages_and_every_request_gets_its_turn() -> None:
    """One with a long prompt's log-probabilities has many times as much as a message holds."""
    caller = await Caller.of(1, 2)
    best = [(token, -1.5) for token in range(20)]
    caller.begun[0].stream.put(StreamChunk(0, prompt_logprobs=[RowLogprobs(-1.0, best)] * 5000))
    caller.begun[0].stream.put(LAST)
    caller.begun[1].stream.put(LAST)
    num_logprobs, order = 0, []
    for _ in range(100):
        message = await caller.group.next_message()
        assert message is not None
        assert message.ByteSize() < 2 * MESSAGE_BYTES
        for answer in message.answers:
            num_logprobs += len(answer.response.prompt_logprobs)
            if answer.response.finish_reason:
                order.append(answer.number)
        if len(order) == 2:
            break
    assert num_logprobs == 5000
    assert sorted(order) == [1, 2]


async def test_all_chunks_that_wait_are_sent_without_another_event() -> None:
    """A reader that was away finds several: a chunk has at most 256 tokens."""
    caller = await Caller.of(1)
    for first in (0, 200):
        caller.begun[0].stream.put(StreamChunk(first, tokens=[SampledToken(5, None)] * 200))
    assert [len(answer.response.token_ids) for answer in await caller.answers()] == [200, 200]


async def test_a_request_that_is_cancelled_while_it_is_tokenised_never_begins() -> None:
    caller = Caller()
    may_begin = asyncio.Event()
    begin = caller.group._begin

    async def slowly(message: worker_pb2.GenerateRequest) -> Request:
        await may_begin.wait()
        return await begin(message)

    caller.group._begin = slowly
    caller.start(1, 2)
    caller.messages.put_nowait(cancel(1))
    await until(lambda: caller.messages.empty())
    await asyncio.sleep(0)
    may_begin.set()
    await caller.has_begun(1)
    caller.begun[0].stream.put(LAST)
    assert await caller.numbers() == [2]
    assert len(caller.begun) == 1


async def test_a_refusal_that_was_taken_makes_room() -> None:
    caller = Caller(max_requests=1)
    caller.start(1, max_tokens=0)
    caller.start(2)
    assert [(answer.number, answer.HasField("status")) for answer in await caller.answers()] == [(1, True)]
    await caller.has_begun(1)


async def test_what_came_before_an_error_is_sent_with_it() -> None:
    caller = await Caller.of(1)
    caller.begun[0].stream.put(StreamChunk(0, tokens=[SampledToken(5, None)]))
    caller.begun[0].stream.fail(EngineError(ErrorKind.BUSY, "lost"))
    first, second = await caller.answers()
    assert (list(first.response.token_ids), list(second.response.token_ids)) == ([5], [])
    assert second.status.message == "lost"


async def test_a_request_for_several_answers_ends_with_the_last_of_them() -> None:
    caller = Caller(max_requests=1)
    request = start(1, 9)
    request.start.n = 2
    caller.messages.put_nowait(request)
    caller.start(2)
    await caller.has_begun(1)
    for index in (1, 0):
        caller.begun[0].stream.put(StreamChunk(0, finish_reason=EndReason.STOP, index=index))
        assert [(answer.number, answer.response.index) for answer in await caller.answers()] == [(1, index)]
        assert len(caller.aborted) == (index == 0), "its blocks are given back when no answer needs them"
    await caller.has_begun(2)


async def test_what_a_stream_says_after_its_last_answer_is_not_passed_on() -> None:
    """A reader may be given up when its last chunk is already on the way."""
    caller = await Caller.of(1)
    caller.begun[0].stream.put(LAST)
    await caller.answers()
    caller.begun[0].stream.give_up(EngineError(ErrorKind.SLOW_READER, "slow"))
    caller.start(2)
    await caller.has_begun(2)
    caller.begun[1].stream.put(LAST)
    assert await caller.numbers() == [2]
    caller.group.end()
    assert caller.aborted == caller.begun
