"""Keeps the cached prefixes up to date while somebody looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvpool.client import ContentsView
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2

LINGER_SECONDS: Final = 30.0
"""Time for which the contents are followed after the last request."""
PATIENCE_SECONDS: Final = 5.0
"""Time for the whole state to arrive, at the first request."""


class Prefixes:
    """The cached prefixes of one gateway, kept up to date while somebody looks."""

    def __init__(self, follow: Callable[[], AsyncGenerator[WatchUpdate, None]]) -> None:
        """`follow` opens a stream of the contents."""
        self._follow = follow
        self._view = ContentsView()
        self._following: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._has_come = asyncio.Event()

    async def look(self) -> ContentsView:
        """Return the view, which is complete if the manager is there. Raises KvpoolError."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._end)
        if self._following is None or self._following.done():
            self._view = ContentsView()
            self._has_come.clear()
            self._following = asyncio.create_task(self._read(), name="gateway-prefixes")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._has_come.wait()
        return self._view

    async def close(self) -> None:
        """Stop following the contents."""
        if self._ending is not None:
            self._ending.cancel()
        self._end()
        if self._following is not None:
            await asyncio.gather(self._following, return_exceptions=True)

    def _end(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _read(self) -> None:
        async with contextlib.aclosing(self._follow()) as updates:
            async for update in updates:
                if isinstance(update, cache_pb2.Contents):
                    self._view.apply(update)
                    if self._view.is_complete:
                        self._has_come.set()
                    await asyncio.sleep(0)  # many messages may be there at once
