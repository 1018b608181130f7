"""An answer of server-sent events (WHATWG HTML, section 9.2), and what to do when a reader goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ReaderLeft(Exception):
    """The reader has gone; nobody waits for the answer any more."""


async def unless_reader_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the reader goes away before, cancel `work`, wait for its end and raise ReaderLeft.

    The request's body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ReaderLeft
    finally:
        tasks = [task for task in (working, watching) if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
