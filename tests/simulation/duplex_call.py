"""A call with requests and answers in both directions at the same time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from tests.simulation.rpc import GONE, Context
from tests.simulation.stream_call import ServerSide, StreamCall

if TYPE_CHECKING:
    from tests.simulation.process import Process

_RETRANSMIT_SECONDS = 0.5
"""A machine sends again what another one has not acknowledged."""


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
