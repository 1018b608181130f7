"""Serves the streams of Watch: pictures, contents or both over one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from kvpool.v1 import cache_pb2

from .. import status
from ..audits import Audits
from ..core.manager import CacheManager
from ..core.refusal import Refusal, bad_field
from .contents import ContentsFeed
from .picture_codec import decode_options
from .pictures import PictureFeed
from .places import Places

Source = AsyncGenerator[cache_pb2.WatchResponse, None]

SILENCE_SECONDS: Final = 2.0
"""A stream without news for so long sends an empty message, which shows that it lives."""

END_SECONDS: Final = 2.0
"""A stream that has lost its place may take so long to end by itself."""


class Watching:
    """All streams of Watch of one manager."""

    def __init__(
        self,
        manager: CacheManager,
        audits: Audits,
        contents: ContentsFeed,
        *,
        max_watchers: int,
        max_seconds: float,
    ) -> None:
        """After `max_seconds` a stream ends, and its reader calls again, perhaps at another server; 0: never."""
        self._manager = manager
        self._pictures = PictureFeed(manager, audits)
        self._contents = contents
        self.places = Places(max_watchers)
        self._max_seconds = max_seconds
        self._stopping: asyncio.Event | None = None
        """Event that ends all streams; the first stream makes it, inside the loop."""
        self._is_stopped = False

    def stop(self) -> None:
        """End all streams with UNAVAILABLE, now and from now on."""
        self._is_stopped = True
        if self._stopping is not None:
            self._stopping.set()

    async def serve(self, request: cache_pb2.WatchRequest, peer: str, cancel: Callable[[], object]) -> Source:
        """Yield the messages of one call. A stream that loses its place ends with the refusal that says so, once the message that
        is being sent has been taken. If its reader takes nothing, `cancel` is called, which cancels the call: not at once, since a
        call that is cancelled while it sends cannot send its status. Raises Refusal (BAD_FIELD, TOO_MANY_WATCHERS) and
        status.ManagerUnavailable."""
        sources, loop = self._sources(request), asyncio.get_running_loop()
        losing: asyncio.Future[Refusal] = loop.create_future()
        timer: asyncio.TimerHandle | None = None

        def end(refusal: Refusal) -> None:
            nonlocal timer
            losing.set_result(refusal)
            timer = loop.call_later(END_SECONDS, cancel)

        place = self.places.take(peer, loop.time(), end)
        try:
            async with contextlib.aclosing(self._merge(sources, losing)) as messages:
                async for message in messages:
                    yield message
        finally:
            self.places.leave(place)
            if timer is not None:
                timer.cancel()

    def _sources(self, request: cache_pb2.WatchRequest) -> list[Source]:
        sources: list[Source] = []
        if request.HasField("picture"):
            wish, interval = decode_options(request.picture, self._manager.limits.max_id_bytes)
            sources.append(self._pictures.follow(wish, interval))
        if request.HasField("contents"):
            sources.append(self._contents.follow(request.contents))
        if not sources:
            raise bad_field("picture", "ask for pictures, for contents or for both: neither is set")
        return sources

    async def _merge(self, sources: list[Source], losing: asyncio.Future[Refusal]) -> Source:
        """Yield the messages of all sources as they come, and an empty message in silence. Raises the result of `losing` when it
        has one."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._max_seconds if self._max_seconds else float("inf")
        if self._stopping is None:
            self._stopping = asyncio.Event()
        if self._is_stopped:
            self._stopping.set()
        stopping = asyncio.ensure_future(self._stopping.wait())
        reading: dict[asyncio.Future[Any], Source] = {
            asyncio.ensure_future(anext(source)): source for source in sources
        }
        try:
            while True:
                patience = min(SILENCE_SECONDS, max(0.0, end - loop.time()))
                waits: set[asyncio.Future[Any]] = {stopping, losing, *reading}
                done, _ = await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if self._is_stopped:
                    raise status.ManagerUnavailable("the manager is shutting down: watch again when it is back")
                if losing.done():
                    raise losing.result()
                if loop.time() >= end:
                    return
                if not done:
                    yield cache_pb2.WatchResponse()
                for read in done:
                    source = reading.pop(read)
                    yield read.result()
                    # Not before: a slow reader is to get a later picture, not one that was made while it read.
                    reading[asyncio.ensure_future(anext(source))] = source
        finally:
            for wait in (stopping, *reading):
                wait.cancel()
            await asyncio.gather(stopping, *reading, return_exceptions=True)
            for source in sources:
                await source.aclose()
