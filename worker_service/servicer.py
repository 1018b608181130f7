"""WorkerService: decode, one call to the engine, encode; how large a request may be, and how long a reader may take nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

import grpc
import structlog

from kvpool.process.call_status import set_status
from kvpool.process.rare_line import RareLine
from kvpool.process.request_guard import SMALL, RequestLimit
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.text_bound import TextBound
from kvpool.v1 import worker_pb2, worker_pb2_grpc

from . import codec, status
from .engine.engine import Engine
from .engine.errors import EngineError, ErrorKind
from .engine.request import GenerationParams, Request
from .generate_many import RequestGroup
from .long_texts import LongTexts

SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


_ROOM: Final = 64 << 10
"""Bytes for all fields but the prompt. At their limits they take a third of it: biases 15 KB, stop strings 4 KB, names."""


def request_limits(max_model_len: int, vocab_size: int, text_bound: TextBound) -> Mapping[str, RequestLimit]:
    """Limits by full method name. A method without an entry gets the smallest limit."""
    generate = RequestLimit(
        _ROOM + max_prompt_bytes(max_model_len, vocab_size, text_bound),
        f"shorten the prompt; this worker takes {max_model_len} tokens (--max-model-len)",
    )
    by_name = {"GetModel": SMALL, "Generate": generate, "GenerateMany": generate}
    return {f"/{SERVICE}/{name}": limit for name, limit in by_name.items()}


def max_prompt_bytes(max_model_len: int, vocab_size: int, text_bound: TextBound) -> int:
    """The largest size in bytes of a prompt, text or ids, of `max_model_len` tokens; at most MAX_MESSAGE_BYTES."""
    # Ids that are not packed have a tag each.
    id_bytes = 1 + -(-max(1, vocab_size - 1).bit_length() // 7)
    if text_bound.uncounted:
        return MAX_MESSAGE_BYTES  # dropped bytes may make a text of any length
    return min(MAX_MESSAGE_BYTES, max(max_model_len * id_bytes, text_bound.max_bytes))


_NUM_CHECKS: Final = 4
"""Timer ticks in one wait. A process that was stopped misses ticks, so its readers get that time back."""

WINDOW_BYTES: Final = 65_535
"""HTTP/2's default flow-control window. A message n times as large may wait n times as long."""


class ReaderWatch:
    """Calls `on_slow` once if a message waits for its reader for `limit_seconds`. 0: never. For one event loop.

    A message waits while HTTP/2's flow control, or the operating system's buffer, has no room for it. Time without a message does
    not count.
    """

    def __init__(self, limit_seconds: float, on_slow: Callable[[], None]) -> None:
        self._limit_seconds = limit_seconds
        self._on_slow = on_slow
        self._timer: asyncio.TimerHandle | None = None
        self.is_slow = False
        """Whether `on_slow` was called."""

    def begin(self, num_bytes: int) -> None:
        """Note that a message of `num_bytes` is handed to the transport."""
        if self._limit_seconds:
            self._check_in(self._limit_seconds * max(1, -(-num_bytes // WINDOW_BYTES)) / _NUM_CHECKS, _NUM_CHECKS)

    def end(self) -> None:
        """Note that the transport has taken the message, or the stream is over. May be repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_in(self, interval_seconds: float, num_left: int) -> None:
        if num_left:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_seconds, self._check_in, interval_seconds, num_left - 1)
        else:
            self._timer = None
            self.is_slow = True
            self._on_slow()


log = structlog.get_logger("kvpool.worker")

GENERATING = frozenset({f"/{SERVICE}/Generate", f"/{SERVICE}/GenerateMany"})

TOKENISE_IN_THREAD_CHARS = 1 << 13
"""Longer texts are tokenised off the event loop; one of this length takes some milliseconds."""

TOKENISE_ALONE_CHARS = 1 << 15
"""Longer texts are tokenised one at a time: each may take seconds, and a hundred times its size in memory."""


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one engine and the files of its model."""

    def __init__(
        self,
        engine: Engine,
        facts: worker_pb2.ModelFacts,
        files: codec.ModelFiles,
        *,
        reader_seconds: float,
        max_requests_of_stream: int = 4096,
    ) -> None:
        """`reader_seconds`: how long a message of Generate or GenerateMany may wait for its reader; 0: no limit.
        `max_requests_of_stream`: requests of one GenerateMany at the same time."""
        self._engine = engine
        self._reader_seconds = reader_seconds
        self._max_requests_of_stream = max_requests_of_stream
        self._facts = facts
        self._files = files
        self._slow_readers = RareLine(log, "readers took nothing: their requests were ended")
        self._long_texts = LongTexts()

    async def GetModel(
        self,
        request: worker_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GetModelRequest, AsyncIterator[worker_pb2.GetModelResponse]],
    ) -> AsyncIterator[worker_pb2.GetModelResponse]:
        yield worker_pb2.GetModelResponse(facts=self._facts)
        if not request.facts_only:
            for part in codec.file_parts(self._files):
                yield part

    async def Generate(
        self,
        request: worker_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[worker_pb2.GenerateRequest, AsyncIterator[worker_pb2.GenerateResponse]],
    ) -> AsyncIterator[worker_pb2.GenerateResponse]:
        try:
            accepted = await self._begin(request)
        except EngineError as error:
            set_status(context, status.of_error(error))
            return
        reader = ReaderWatch(self._reader_seconds, lambda: self._give_up([accepted], context.peer()))

        def end(_: object = None) -> None:
            reader.end()
            self._engine.abort(accepted)

        # If the client goes away while a message waits to be sent, only the garbage collector would run the `finally`.
        context.add_done_callback(end)  # type: ignore[arg-type]
        try:
            while (chunk := await accepted.stream.get()) is not None:
                for message in codec.encode_chunk(chunk):
                    reader.begin(message.ByteSize())
                    yield message  # returns when the transport has taken it
                    reader.end()
                    if reader.is_slow:
                        break  # the next get() raises the stream's error
        except EngineError as error:
            set_status(context, status.of_error(error))
        finally:
            end()  # at the end, and when gRPC cancels this coroutine

    async def GenerateMany(
        self,
        request_iterator: AsyncIterator[worker_pb2.GenerateManyRequest],
        context: grpc.aio.ServicerContext[
            AsyncIterator[worker_pb2.GenerateManyRequest], AsyncIterator[worker_pb2.GenerateManyResponse]
        ],
    ) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        group = RequestGroup(self._begin, self._engine.abort, self._max_requests_of_stream)
        reader = ReaderWatch(self._reader_seconds, lambda: self._give_up(group.requests, context.peer()))

        def end(_: object = None) -> None:
            reader.end()
            group.end()

        context.add_done_callback(end)  # type: ignore[arg-type]
        group.read(request_iterator)
        try:
            while (message := await group.next_message()) is not None:
                reader.begin(message.ByteSize())
                yield message
                reader.end()
        except EngineError as error:
            set_status(context, status.of_error(error))
        finally:
            end()

    async def _begin(self, request: worker_pb2.GenerateRequest) -> Request:
        """Hand a request to the engine. Raises EngineError, also for a bug, and counts it."""
        try:
            return self._engine.submit(await self._decode(request))
        except EngineError as error:
            self._engine.stats.refused[error.kind] += 1
            raise
        except Exception:
            log.exception("request failed")
            self._engine.stats.refused[ErrorKind.INTERNAL] += 1
            raise EngineError(ErrorKind.INTERNAL, "the worker failed; its log has the traceback") from None

    def _give_up(self, requests: list[Request], peer: str) -> None:
        """End requests whose reader takes nothing. Their blocks are freed now; the reader gets the status after the message that
        waits, since an HTTP/2 stream is ordered."""
        for request in requests:
            self._engine.give_up_reader(request, self._reader_seconds)
            self._slow_readers.note(peer=peer, num_generated_tokens=request.num_generated_in_all)

    def on_unread(self, method: str, reason: str) -> None:
        """Count a call that was refused before its request was read."""
        if method in GENERATING:
            self._engine.stats.refused[ErrorKind.INVALID] += 1

    async def _decode(self, request: worker_pb2.GenerateRequest) -> GenerationParams:
        """The request as the engine's parameters. The cheap checks come first, so that a refusal does not wait for tokenising."""
        prompts = self._engine.prompts
        codec.check_generate(request, prompts, self._facts.model_fingerprint)
        num_chars = len(request.text)
        if num_chars <= TOKENISE_IN_THREAD_CHARS:
            return codec.decode_generate(request, prompts, self._facts.defaults)
        decode = partial(codec.decode_generate, request, prompts, self._facts.defaults)
        if num_chars <= TOKENISE_ALONE_CHARS:
            return await asyncio.get_running_loop().run_in_executor(None, decode)
        return await self._long_texts.run(request.tenant, num_chars, decode)
