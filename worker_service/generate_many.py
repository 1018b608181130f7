"""Many requests over one stream: each message holds what has become ready for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from kvpool.v1 import worker_pb2

from . import codec, status
from .engine.errors import EngineError, invalid
from .engine.request import Request

MESSAGE_BYTES: Final = 1 << 16
"""A message is not extended beyond that: as much as HTTP/2 sends without a word from the reader."""


class RequestGroup:
    """The requests of one GenerateMany call: begun and ended as the caller's messages say, answered in common messages.

    A request counts until its last answer is taken here. One that finds no room waits, and all messages after it: a caller
    that takes no answers cannot pile up more than that.
    """

    def __init__(
        self,
        begin: Callable[[worker_pb2.GenerateRequest], Awaitable[Request]],
        abort: Callable[[Request], None],
        max_requests: int,
    ) -> None:
        """`begin` hands a request to the engine, or raises EngineError; `abort` ends it there, without effect if it has ended."""
        self._begin = begin
        self._abort = abort
        self._max_requests = max_requests
        self._beginning: dict[int, asyncio.Task[None]] = {}
        """Requests that are being decoded and tokenised, by number; the next three are by number, too."""
        self._running: dict[int, Request] = {}
        self._refused: dict[int, EngineError] = {}
        self._ready: dict[int, None] = {}
        """Requests that may have an answer, the one that has waited longest first."""
        self._unsent: deque[worker_pb2.Answer] = deque()
        """Answers that did not fit into the last message."""
        self._last_number = 0
        self._reading: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    @property
    def requests(self) -> list[Request]:
        """The requests that run."""
        return list(self._running.values())

    def read(self, messages: AsyncIterator[worker_pb2.GenerateManyRequest]) -> None:
        """Take the caller's messages in the background, until it closes its side or `end`."""
        self._reading = asyncio.create_task(self._read(messages))
        self._reading.add_done_callback(lambda _: self._changed.set())

    async def _read(self, messages: AsyncIterator[worker_pb2.GenerateManyRequest]) -> None:
        async for message in messages:
            action = message.WhichOneof("action")
            if action == "start":
                if message.number <= self._last_number:
                    raise invalid(
                        "number", f"needed more than {self._last_number}, got {message.number}: it names a request"
                    )
                self._last_number = message.number
                await self._has_room.wait()  # here and not after it: the next message may be a cancel that makes room
                self._beginning[message.number] = asyncio.create_task(self._start(message.number, message.start))
                self._note_room()
            elif action == "cancel":
                self._remove(message.number)
            else:
                raise invalid("action", "needed start or cancel, got neither")

    async def _start(self, number: int, message: worker_pb2.GenerateRequest) -> None:
        try:
            request = await self._begin(message)
        except EngineError as error:
            self._refused[number] = error
            self._note_ready(number)
        else:
            self._running[number] = request
            request.stream.watch(lambda: self._note_ready(number))
        finally:
            # A cancelled one is out already.
            self._beginning.pop(number, None)

    def _note_ready(self, number: int) -> None:
        if number in self._running or number in self._refused:  # else it has ended here before its stream has
            self._ready[number] = None
            self._changed.set()

    def _note_room(self) -> None:
        if len(self._beginning) + len(self._running) + len(self._refused) < self._max_requests:
            self._has_room.set()
        else:
            self._has_room.clear()

    def _remove(self, number: int) -> None:
        """End a request, wherever it is. No effect if it has ended."""
        self._ready.pop(number, None)
        self._refused.pop(number, None)
        beginning = self._beginning.pop(number, None)
        if beginning is not None:
            beginning.cancel()
        request = self._running.pop(number, None)
        if request is not None:
            self._abort(request)
        self._note_room()
        self._changed.set()

    def end(self) -> None:
        """End all requests. May be repeated."""
        if self._reading is not None:
            self._reading.cancel()
        for number in [*self._beginning, *self._running, *self._refused]:
            self._remove(number)

    async def next_message(self) -> worker_pb2.GenerateManyResponse | None:
        """What is ready now, as soon as something is; None when the caller has closed its side and all requests have ended.

        Raises what reading the caller's messages raised: EngineError for a message that breaks the rules.
        """
        assert self._reading is not None
        while True:
            self._changed.clear()
            message = self._gather()
            if message.answers:
                return message
            if self._reading.done():
                self._reading.result()
                if not self._beginning and not self._running:
                    return None
            await self._changed.wait()

    def _gather(self) -> worker_pb2.GenerateManyResponse:
        message = worker_pb2.GenerateManyResponse()
        num_bytes = 0
        while (self._unsent or self._ready) and num_bytes < MESSAGE_BYTES:
            if not self._unsent:
                number = next(iter(self._ready))
                del self._ready[number]
                self._unsent.extend(self._answers(number))
                continue
            answer = self._unsent.popleft()
            message.answers.append(answer)
            num_bytes += answer.ByteSize()
        return message

    def _answers(self, number: int) -> list[worker_pb2.Answer]:
        """The next chunk of a request, or its end."""
        refused = self._refused.pop(number, None)
        if refused is not None:
            self._note_room()
            return [worker_pb2.Answer(number=number, status=status.of_error(refused))]
        stream = self._running[number].stream
        try:
            chunk = stream.take()
        except EngineError as error:
            self._remove(number)
            return [worker_pb2.Answer(number=number, status=status.of_error(error))]
        if chunk is None:
            return []
        if stream.is_read:
            self._remove(number)
        elif stream.has_unread or stream.is_finished:
            self._ready[number] = None
        return [worker_pb2.Answer(number=number, response=response) for response in codec.encode_chunk(chunk)]
