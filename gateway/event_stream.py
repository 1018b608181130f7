"""An answer of server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .disconnect import ReaderLeft, unless_reader_leaves


class EventStream(Response):
    """Sends events as they come, each when the one before has been taken. The generator is closed when the reader leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        on_end: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        """`on_end` is called in any case, even if no event could be sent, with whether the reader has left before the end."""
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the reader leaves."""
        has_left = False
        try:
            await unless_reader_leaves(receive, self._send(send))
        except ReaderLeft:
            has_left = True
        finally:
            await self._events.aclose()
            if self._on_end is not None:
                await self._on_end(has_left)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
