"""One request: from the prompt to the last token, over as many workers as it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Final
from uuid import uuid4

import grpc.aio
from kvpool.v1 import common_pb2, worker_pb2, worker_pb2_grpc

from .attempts import Attempts, Target
from .channels import MAX_MESSAGE_BYTES, Channels
from .chunk import Chunk, chunk_from_proto
from .completion import Completion, CompletionBuilder
from .config import ClientConfig
from .deadline import Deadline
from .errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    KvpoolError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from .gate import Gate
from .manager import Manager
from .model import Model
from .models import Models
from .options import GenerateSettings

_NO_WORKER_PAUSE_SECONDS: Final = 0.2
# Longer than a channel waits before it dials a dead address again, so that the second round really dials.
_SECOND_ROUND_PAUSE_SECONDS: Final = 1.3

Call = grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class GenerateStream:
    """The chunks of one answer, in order. Nothing happens before the first is asked for.

    Use it as `async with client.generate(…) as stream: async for chunk in stream: …`: leaving the block cancels the call,
    and the worker frees the sequence's blocks. Without the block the call ends with the last chunk, or when the object
    is dropped. For one task at a time.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Model], list[int]],
        settings: GenerateSettings,
        models: Models,
        manager: Manager,
        channels: Channels,
        config: ClientConfig,
    ) -> None:
        self._encode = encode
        self._settings = settings
        self._models = models
        self._manager = manager
        self._channels = channels
        self._config = config
        self._sequence_id: Final = str(uuid4())
        self._attempts = Attempts(config.max_attempts)
        self._gate = Gate()
        self._builder = CompletionBuilder()
        self._deadline: Deadline | None = None
        self._model: Model | None = None
        self._token_ids: list[int] = []
        self._target: Target | None = None
        self._call: Call | None = None
        self._is_ended = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __del__(self) -> None:
        # grpc.aio's calls live in reference cycles: without this a dropped stream would hold its blocks until the
        # collector comes by. It may run in any thread, so the loop's own thread has to cancel.
        if self._call is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    def __repr__(self) -> str:
        return f"GenerateStream({self._sequence_id}, {self._target}, {self._gate}, ended={self._is_ended})"

    @property
    def sequence_id(self) -> str:
        """The name of the sequence at the manager and the workers."""
        return self._sequence_id

    @property
    def model(self) -> Model | None:
        """The model that answers; None before the first chunk."""
        return self._model

    def __aiter__(self) -> GenerateStream:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self.next_chunk()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> GenerateStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request: its call is cancelled if it still runs. May be repeated."""
        self._is_ended = True
        self._drop_call()

    async def collect(self) -> Completion:
        """Wait for the end and return the whole answer, chunks that were already taken included."""
        while await self.next_chunk() is not None:
            pass
        return self._builder.build()

    async def next_chunk(self) -> Chunk | None:
        """The next chunk; None behind the last. An error, or cancelling the task, ends the stream and its call."""
        if self._is_ended:
            return None
        try:
            chunk = await self._next_chunk()
        except BaseException:
            await self.aclose()
            raise
        if chunk.finish_reason is not None:
            await self.aclose()
        return chunk

    async def _next_chunk(self) -> Chunk:
        if self._deadline is None:
            self._deadline = Deadline(self._settings.timeout or self._config.timeout)
            self._loop = asyncio.get_running_loop()
        while True:
            if self._call is None or self._target is None:
                self._call, self._target = await self._open(self._deadline)
            target = self._target
            try:
                message = await self._read(self._call, target, self._deadline)
            except KvpoolError as error:
                # Behind the first token only a continuation would do: prompt + delivered tokens, under a larger attempt.
                if self._gate.num_delivered > 0 or not _another_may_answer(error):
                    raise
                self._attempts.failed(target, error)
                self._drop_call()
                continue
            accepted = self._gate.take(target.attempt, message.start_index, len(message.token_ids))
            if accepted is None:
                continue
            chunk = chunk_from_proto(
                message,
                start_index=accepted.start_index,
                worker_id=target.worker_id,
                attempt=target.attempt,
                want_logprobs=self._settings.logprobs is not None,
            )
            self._builder.add(chunk, self._deadline.elapsed() * 1000)
            return chunk

    async def _open(self, deadline: Deadline) -> tuple[Call, Target]:
        """Begin the next attempt. Its first message may still be an error."""
        if self._attempts.wants_ranking:
            if self._attempts.has_failed:
                await asyncio.sleep(min(_SECOND_ROUND_PAUSE_SECONDS, deadline.remaining()))
            await self._rank(deadline)
        deadline.check("looking for a worker")
        target = self._attempts.next()
        assert self._model is not None
        request = self._settings.request(
            token_ids=self._token_ids,
            sequence_id=self._sequence_id,
            attempt=target.attempt,
            model_fingerprint=self._model.fingerprint,
        )
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise InvalidRequest(
                f"the request has {request.ByteSize()} bytes, a message holds {MAX_MESSAGE_BYTES}", reason="NEVER_FITS"
            )
        self._gate.open(target.attempt)
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(target.address))
        return stub.Generate(request, timeout=deadline.remaining()), target

    async def _rank(self, deadline: Deadline) -> None:
        """Know the model, tokenise for it and let the manager rank its workers; waits a little for a first worker."""
        waited = Deadline(self._config.worker_wait, deadline.clock)
        while True:
            try:
                model = await self._models.get(self._settings.model, deadline)
                if model is not self._model:
                    self._token_ids = await self._encode_within(model, deadline)
                    self._model = model
                root = common_pb2.Root(
                    model_fingerprint=model.fingerprint,
                    adapter=self._settings.adapter,
                    tenant_salt=self._settings.tenant_salt,
                )
                response = await self._manager.route(
                    deadline, root, self._token_ids, max_workers=self._config.max_attempts
                )
                if response.workers:
                    self._attempts.rank(response.workers)
                    return
                # Its workers are gone, or back with other weights: find out what is served now.
                self._models.forget(model)
                raise Unavailable(
                    f"no live worker serves {model.name}: {response.explanation or 'the manager names none'}",
                    reason="NO_WORKER",
                )
            except Unavailable as error:
                if error.reason == "NO_MANAGER" or min(waited.remaining(), deadline.remaining()) == 0:
                    raise
                await asyncio.sleep(min(_NO_WORKER_PAUSE_SECONDS, waited.remaining()))

    async def _encode_within(self, model: Model, deadline: Deadline) -> list[int]:
        """Tokenise off the event loop. A chat template that never ends costs its thread, not the caller."""
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.to_thread(self._encode, model)
        except TimeoutError:
            deadline.check("rendering and tokenising the prompt")
            raise

    async def _read(self, call: Call, target: Target, deadline: Deadline) -> worker_pb2.GenerateResponse:
        """The next message of the call, or what became of it as a KvpoolError."""
        who = f"{target.worker_id} ({target.address})"
        try:
            # While the first token is not there, a frozen worker looks like a busy one: the manager knows the difference.
            if self._gate.num_delivered == 0:
                message = await self._read_watched(call, target, deadline)
            else:
                message = await call.read()
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, who)
            if isinstance(error, DeadlineExceeded) and not error.reason:
                error = deadline.exceeded(f"{who} was answering, {self._gate.num_delivered} tokens were there")
            raise error from rpc_error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio raises this also for a status CANCELLED, sent by the server or made by our own aclose().
            raise Cancelled(f"{who}: the stream was closed before its end", reason="CANCELLED") from None
        if isinstance(message, worker_pb2.GenerateResponse):
            return message
        raise ProtocolError(f"{who} ended its stream without a finish reason", reason="INCOMPLETE")

    async def _read_watched(self, call: Call, target: Target, deadline: Deadline) -> object:
        read = asyncio.ensure_future(call.read())
        num_missing = 0
        try:
            while True:
                done, _ = await asyncio.wait({read}, timeout=self._config.liveness_interval)
                if done:
                    return read.result()
                # Once may be a manager that has just restarted and waits for registrations.
                num_missing = 0 if await self._is_live(target, deadline) else num_missing + 1
                # The answer may have come while we asked.
                if num_missing == 2 and not read.done():
                    raise Unavailable(
                        f"{target.worker_id} ({target.address}): does not answer, and its lease has ended",
                        reason="LEASE_ENDED",
                    )
        finally:
            read.cancel()

    async def _is_live(self, target: Target, deadline: Deadline) -> bool:
        """Whether the manager still counts on the worker; also if the manager itself cannot say."""
        brief = Deadline(min(self._config.liveness_interval, max(deadline.remaining(), 0.001)), deadline.clock)
        try:
            response = await self._manager.describe(brief)
        except KvpoolError:
            return True
        return any(
            worker.worker_id == target.worker_id and worker.address == target.address for worker in response.workers
        )

    def _drop_call(self) -> None:
        call, self._call, self._target = self._call, None, None
        if call is not None:
            call.cancel()


def _another_may_answer(error: KvpoolError) -> bool:
    # RESOURCE_EXHAUSTED without a reason is gRPC's own, about the size of a message: the same everywhere.
    return isinstance(error, Unavailable) or (isinstance(error, ResourceExhausted) and error.reason != "")
