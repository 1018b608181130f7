"""The streams to workers that many requests share: one GenerateMany call to each worker, as long as it has requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeAlias

import grpc.aio
from google.rpc import status_pb2

from kvpool.v1 import worker_pb2

from .errors import Cancelled, ResourceExhausted

MAX_REQUESTS: Final = 256
"""Requests on one stream; the next one begins another. A worker takes 4,096 by default."""
MAX_AGE_SECONDS: Final = 60.0
"""An older stream takes no new requests: a busy client would otherwise keep it, and its connection, for ever."""

MAX_UNREAD_BYTES: Final = 64 << 20
"""Size of the responses to one request that its reader has not taken. Other requests on the stream cannot wait for this reader."""

GenerateMany: TypeAlias = Callable[[AsyncIterator[worker_pb2.GenerateManyRequest]], Any]
"""The stub's method: returns a grpc.aio.StreamStreamCall."""
Ending: TypeAlias = status_pb2.Status | grpc.aio.AioRpcError
"""How a request ended before its last response: the worker's status for it, or the error of the whole stream."""


class EndedEarly(Exception):
    """A request ended before its last response."""

    def __init__(self, ending: Ending | None) -> None:
        """`ending` None: the stream ended with OK and without a status for this request."""
        super().__init__(repr(ending))
        self.ending: Final = ending


class Answers:
    """The responses to one request. Only one task may read them."""

    def __init__(self, cancel: Callable[[], None], abandon: Callable[[], None], num_texts: int = 1) -> None:
        self._num_unfinished = num_texts
        self._cancel = cancel
        self._abandon = abandon
        self._unread: deque[tuple[worker_pb2.GenerateResponse, int]] = deque()
        """Responses, and the bytes of those that came while others were unread."""
        self._num_bytes = 0
        """Bytes of all unread responses, as noted with each."""
        self._end: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None

    async def read(self) -> worker_pb2.GenerateResponse:
        """Wait for the next response. Raises EndedEarly, or the error that `cancel` was given; Cancelled if the client was
        closed."""
        while not self._unread:
            if self._end is not None:
                raise self._end
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        response, num_bytes = self._unread.popleft()
        self._num_bytes -= num_bytes
        return response

    def cancel(self, why: Exception) -> None:
        """End the request; the worker frees its blocks. A read that waits raises `why`. No effect if it has ended."""
        if self._end is None:
            self._unread.clear()
            self.end(why)
            self._cancel()

    def abandon(self, why: Exception) -> None:
        """Cancel because the worker is lost: no request begins on this stream any more."""
        if self._end is None:
            self._abandon()
        self.cancel(why)

    def put(self, response: worker_pb2.GenerateResponse) -> None:
        """Take in a response of the stream. The one that finishes the last text is the last one. The request is cancelled if its
        reader leaves too much unread."""
        num_bytes = response.ByteSize() if self._unread else 0
        if self._num_bytes + num_bytes > MAX_UNREAD_BYTES:
            why = f"more than {MAX_UNREAD_BYTES} bytes of an answer were not read: read faster, or ask for less"
            self.cancel(ResourceExhausted(why, reason="SLOW_READER"))
        if self._end is None:
            self._unread.append((response, num_bytes))
            self._num_bytes += num_bytes
            self._wake()
            self._num_unfinished -= response.finish_reason != worker_pb2.FINISH_REASON_UNSPECIFIED
            if not self._num_unfinished:
                self.end(EndedEarly(None))

    @property
    def has_ended(self) -> bool:
        """Whether no response follows those that were put."""
        return self._end is not None

    def end(self, why: Exception) -> None:
        """Note that no response follows those that were put; a read after the last one raises `why`."""
        if self._end is None:
            self._end = why
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Stream:
    """One GenerateMany call."""

    def __init__(self, generate_many: GenerateMany, on_end: Callable[[_Stream], None]) -> None:
        self._on_end = on_end
        self._begun_at = asyncio.get_running_loop().time()
        self._answers: dict[int, Answers] = {}
        self._last_number = 0
        self._outgoing: asyncio.Queue[worker_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._is_retired = False
        """Whether it takes no new requests."""
        self._is_closed = False
        """Whether the end of the requests was sent."""
        self._call = generate_many(self._requests())
        self._reading = asyncio.create_task(self._read())

    @property
    def has_room(self) -> bool:
        """Whether another request may begin on it."""
        if self._is_retired or len(self._answers) >= MAX_REQUESTS:
            return False
        return asyncio.get_running_loop().time() - self._begun_at < MAX_AGE_SECONDS

    def begin(self, request: worker_pb2.GenerateRequest) -> Answers:
        self._last_number += 1
        number = self._last_number
        num_texts = max(1, request.n)
        answers = self._answers[number] = Answers(lambda: self._cancel(number), self._retire, num_texts)
        self._outgoing.put_nowait(worker_pb2.GenerateManyRequest(number=number, start=request))
        return answers

    def end(self) -> asyncio.Task[None]:
        """End the call and all its requests; returns the task that reads it, which ends then."""
        self._call.cancel()
        return self._reading

    async def _requests(self) -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    def _cancel(self, number: int) -> None:
        if self._answers.pop(number, None) is not None:
            self._outgoing.put_nowait(worker_pb2.GenerateManyRequest(number=number, cancel=worker_pb2.Cancel()))
            self._close_if_empty()

    def _retire(self) -> None:
        self._is_retired = True

    def _close_if_empty(self) -> None:
        """Close the stream if it has no requests: a worker that stops waits for its calls."""
        if not self._answers:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_retired = self._is_closed = True
            self._outgoing.put_nowait(None)
            self._on_end(self)

    async def _read(self) -> None:
        why: Exception = EndedEarly(None)
        try:
            while isinstance(message := await self._call.read(), worker_pb2.GenerateManyResponse):
                for answer in message.answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            why = EndedEarly(error)
        except asyncio.CancelledError:
            # `close`, or a status CANCELLED, which grpc.aio raises as this too.
            why = Cancelled("the stream was closed before its end", reason="CANCELLED")
            raise
        finally:
            self._end(why)

    def _take(self, answer: worker_pb2.Answer) -> None:
        answers = self._answers.get(answer.number)
        if answers is None:
            return  # it was cancelled
        if answer.HasField("status"):
            answers.end(EndedEarly(answer.status))
        else:
            answers.put(answer.response)
            if not answers.has_ended:
                return
        self._answers.pop(answer.number, None)
        self._close_if_empty()

    def _end(self, why: Exception) -> None:
        self._close()
        while self._answers:
            self._answers.popitem()[1].end(why)


class AnswerStreams:
    """The streams of one client. Use it, and close it, inside one running event loop."""

    def __init__(self, method: Callable[[str], GenerateMany]) -> None:
        """`method` gives the GenerateMany of the worker at host:port."""
        self._method = method
        self._newest: dict[str, _Stream] = {}
        """The stream to each address that takes new requests."""
        self._open: set[_Stream] = set()
        """Streams that have requests."""

    def begin(self, address: str, request: worker_pb2.GenerateRequest) -> Answers:
        """Send a request to the worker at host:port, on the stream that its other requests share."""
        stream = self._newest.get(address)
        if stream is None or not stream.has_room:
            stream = self._newest[address] = _Stream(self._method(address), lambda ended: self._forget(address, ended))
            self._open.add(stream)
        return stream.begin(request)

    def _forget(self, address: str, stream: _Stream) -> None:
        self._open.discard(stream)
        if self._newest.get(address) is stream:
            del self._newest[address]

    async def close(self) -> None:
        """End all requests."""
        await asyncio.gather(*(stream.end() for stream in list(self._open)), return_exceptions=True)
