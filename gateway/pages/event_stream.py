"""An answer that continues as long as its reader stays."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..disconnect import ReaderLeft, unless_reader_leaves

_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class PageEvents(Response):
    """Sends events as they come, each when the one before has been taken. The generator is closed when the reader leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the reader leaves."""
        with contextlib.suppress(ReaderLeft):
            await unless_reader_leaves(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
