"""Calls with a stream of answers, or of requests too, over a connection of their own that keeps the order of each direction."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import text_format

from kvpool.process.channel_options import PING_SECONDS, PING_TIMEOUT_SECONDS
from tests.simulation.rpc import EXPIRED, GONE, Call, Context, Failure

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel
    from tests.simulation.process import Process

_RESET_SECONDS = 0.1
"""After which both ends hear that the connection has broken."""
_RETRANSMIT_SECONDS = 0.5
"""A machine sends again what another one has not acknowledged."""


class ServerSide:
    """A call as one process serves it. `is_repeated`: its answers are dropped."""

    def __init__(self, server: Process, is_repeated: bool) -> None:
        self.server = server
        self.is_repeated = is_repeated
        self.task: asyncio.Task[None]
        self.taken: list[bytes] = []
        """The requests that the servicer has read, each as soon as it asks for the next: then it has begun this one."""
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_closed = False
        self._is_answered = False

    def put(self, request: bytes | None) -> None:
        """A message of the caller has come; None: it has closed its side."""
        if not self._is_closed:
            self._is_closed = request is None
            self._requests.put_nowait(request)

    async def requests(self, deserializer: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """The caller's messages as they come, until it closes its side.

        As in grpc.aio the iterator also ends when the call is cancelled, which only the servicer's method sees. Once the answer has
        ended it raises UsageError.
        """
        while (request := await self._requests.get()) is not None:
            yield deserializer(request)
            self.taken.append(request)
        if self._is_answered:
            raise grpc.aio.UsageError("RPC already finished.")

    def end_requests(self) -> None:
        """Nothing follows; what is unread is lost."""
        while not self._requests.empty():
            self._requests.get_nowait()
        self._is_closed = True
        self._requests.put_nowait(None)

    def finish(self) -> None:
        self._is_answered = True
        self.end_requests()

    def cancel(self) -> None:
        self.task.cancel()


class StreamCall(Call):
    """A call with one request and a stream of answers."""

    is_broken = False
    """The connection has broken: nothing more comes through."""

    def begin(self, request: Any, timeout: float | None) -> StreamCall:
        self.request = self.serializer(request)
        self._open(timeout)
        return self

    def _open(self, timeout: float | None) -> None:
        self.last_arrival: dict[str, float] = {}
        """Of a message, by the machine to which it went."""
        self._messages: deque[bytes] = deque()
        self._end: Failure | None = None
        self._is_over = False
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._server_side: ServerSide | None = None
        self._timer = None if timeout is None else self.process.loop.call_later(timeout, self._expire)
        if self.bus.is_over:
            self._finish(GONE)
            return
        self.bus.open_calls[self] = None
        self._send(self._arrive)

    # -- the caller's side

    async def read(self) -> Any:
        """The next message; EOF at the end. Raises AioRpcError, CancelledError. A read that is cancelled cancels the call."""
        while True:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._messages:
                return self.deserializer(self._messages.popleft())
            if self._is_over:
                if self._end is None:
                    return grpc.aio.EOF
                raise self._end.error()
            self._waiter = self.process.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        """End the call; its server hears of it. False if it has ended."""
        if self._is_over:
            return False
        self._is_cancelled = True
        self._finish(None)
        self._send(self._stop_serving)
        return True

    def _expire(self) -> None:
        if not self._is_over:
            self._finish(EXPIRED)
            self._send(self._stop_serving)

    def _finish(self, end: Failure | None) -> None:
        if self._is_over:
            return
        self._is_over, self._end = True, end
        if self._timer is not None:
            self._timer.cancel()
        self.bus.open_calls.pop(self, None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, message: bytes) -> None:
        self.bus.kernel.note(f"{self.process.name} {self.method}", zlib.crc32(message).to_bytes(4, "little"))
        if not self._is_over:
            self._messages.append(message)
            self._wake()

    def _send(self, arrive: Callable[..., None], *args: Any) -> None:
        if not self.bus.is_over:
            self.bus.send_in_order(self, self.process, self.process.machine, self.target, arrive, *args)

    # -- the server's side

    def _arrive(self) -> None:
        if self.is_broken:
            return
        server = self.server()
        if server is None:
            self._say(self.process, self._finish, GONE)
            return
        # A frozen process accepts as well, and its peers hear of its death.
        self._server_side = ServerSide(server, is_repeated=False)
        if self in self.bus.open_calls:
            self.bus.open_calls[self] = server
        server.deliver(self._serve, self._server_side)

    def _serve(self, side: ServerSide) -> None:
        if not side.is_repeated:
            # A second one in front of the first would be the one that is answered: no transport does that to a stream.
            later = self.bus.repeats()
            if later is not None and self.method != "Watch":  # which nothing would ever end
                self.bus.kernel.after(10 * later, self._arrive_again)
        side.task = side.server.loop.create_task(self._answer(side))

    def _arrive_again(self) -> None:
        server = self.server()
        if server is not None:
            server.deliver(self._serve, self._repeated(server))

    def _repeated(self, server: Process) -> ServerSide:
        return ServerSide(server, is_repeated=True)

    async def _answer(self, side: ServerSide) -> None:
        server = side.server
        handler = server.handlers[self.method]
        context = Context(f"simulated:{self.process.machine}:{self.process.name}")
        server.world.counts[f"operation: {self.method}"] += 1
        server.kernel.trace(server.name, f"{self.method} of {self.process.name}{' again' if side.is_repeated else ''}")
        try:
            async for response in self._responses(handler, context, side):
                if not side.is_repeated:
                    self._say(server, self._take, handler.response_serializer(response))
            self._end_answer(side, context)
        except asyncio.CancelledError:
            # As process/request_guard.py does: the servicer may cancel a call to which it has given a status.
            if context.failure is None:
                raise
            self._end_answer(side, context)
        finally:
            context.done()

    def _end_answer(self, side: ServerSide, context: Context) -> None:
        side.finish()
        if not side.is_repeated:
            self._say(side.server, self._finish, context.failure)

    def _responses(self, handler: Any, context: Context, side: ServerSide) -> AsyncIterator[Any]:
        responses: AsyncIterator[Any] = handler.unary_stream(handler.request_deserializer(self.request), context)
        return responses

    def _say(self, sender: Process, take: Callable[..., None], what: Any) -> None:
        if not self.bus.is_over:
            machine = self.process.machine
            self.bus.send_in_order(self, sender, self.target, machine, self.process.deliver, take, what)

    def _stop_serving(self) -> None:
        side = self._server_side
        if side is not None and self.server() is side.server:
            # Two turns: the reader of the requests may act on their end before the servicer's method is cancelled.
            side.server.deliver(side.end_requests)
            side.server.deliver(side.cancel)

    # -- faults

    def break_off(self, kernel: Kernel) -> None:
        self.is_broken = True
        kernel.after(_RESET_SECONDS, self.process.deliver, self._finish, GONE)
        kernel.after(_RESET_SECONDS, self._stop_serving)

    def on_peer_death(self, process: Process) -> None:
        self.bus.open_calls.pop(self, None)
        if process is self.process:
            self._send(self._stop_serving)
        else:
            self._say(process, self._finish, GONE)

    def on_power_loss(self, process: Process) -> None:
        """Neither end hears anything until the other one no longer answers its pings."""
        self.bus.open_calls.pop(self, None)
        seconds = PING_SECONDS + PING_TIMEOUT_SECONDS
        if process is self.process:
            self.bus.kernel.after(seconds, self._stop_serving)
        else:
            self.bus.kernel.after(seconds, self.process.deliver, self._finish, GONE)


class DuplexCall(StreamCall):
    """A call with a stream of requests and a stream of answers.

    Each request is a message of its own, after the call's opening. No transport repeats a single message of a stream, but a proxy
    may take a connection for lost, soon after a request or late: it opens the call once more, sends again the requests that the
    server has read so far, closes the caller's side, and drops the answers.
    """

    def begin(self, request: AsyncIterator[Any], timeout: float | None) -> DuplexCall:
        """Open the call, and send the requests that the iterator gives, in a task of the caller's process."""
        self._sending: asyncio.Task[None] | None = None
        self._open(timeout)
        if not self._is_over:
            self._sending = self.process.loop.create_task(self._send_all(request))
        return self

    # -- the caller's side

    async def _send_all(self, requests: AsyncIterator[Any]) -> None:
        """Ends with the iterator, or at the first request after the end of the call.

        An iterator that fails cancels the call. grpc.aio hides its error; here it breaks a law.
        """
        try:
            async for request in requests:
                if self._is_over:
                    return
                self.process.on_request(self.method, request)
                self._send(self._arrive_request, self.serializer(request))
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:
            self.cancel()
            self.process.loop.call_exception_handler(
                {"message": f"the requests of {self.method} failed", "exception": error}
            )
            return
        if not self._is_over:
            self._send(self._arrive_request, None)

    def cancel(self) -> bool:
        """End the call; its server hears of it. No further request is taken from the iterator. False if it has ended."""
        if not super().cancel():
            return False
        if self._sending is not None:
            self._sending.cancel()
        return True

    # -- the server's side

    def _arrive_request(self, request: bytes | None) -> None:
        side = self._server_side
        if side is None or self.is_broken:
            return
        server = self.server()
        if server is side.server:
            server.deliver(self._put, side, request)
        elif not side.server.lost_power or self._is_over or self.process.is_dead:
            return  # the caller has heard of the end, or will
        elif server is None:
            # The machine is off: the caller's one sends it again until it is answered.
            self.bus.kernel.after(_RETRANSMIT_SECONDS, self._send, self._arrive_request, request)
        else:
            # The machine is back, and knows nothing of the connection.
            self._say(self.process, self._finish, GONE)

    def _put(self, side: ServerSide, request: bytes | None) -> None:
        kernel = self.bus.kernel
        if request is None:
            kernel.note(f"{side.server.name} {self.method} has all requests")
        else:
            kernel.note(f"{side.server.name} {self.method}", zlib.crc32(request).to_bytes(4, "little"))
            if kernel.is_traced:
                message = side.server.handlers[self.method].request_deserializer(request)
                text = text_format.MessageToString(message, as_one_line=True)
                kernel.trace(side.server.name, f"{self.method} of {self.process.name}: {text[:160]}")
            later = self.bus.repeats()
            if later is not None:
                kernel.after(later, self._arrive_again)
        side.put(request)

    def _repeated(self, server: Process) -> ServerSide:
        side = super()._repeated(server)
        # Those that it has not begun yet would be begun by the repeated call first, which nothing answers.
        for request in () if self._server_side is None else self._server_side.taken:
            side.put(request)
        side.put(None)
        return side

    def _responses(self, handler: Any, context: Context, side: ServerSide) -> AsyncIterator[Any]:
        responses: AsyncIterator[Any] = handler.stream_stream(side.requests(handler.request_deserializer), context)
        return responses
