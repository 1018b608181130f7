"""Follows the manager's pictures while somebody looks at the page, and shares them among all browsers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import structlog

from kvpool.client import KvpoolError, ManagerAway, ProtocolError
from kvpool.client.watch import WatchUpdate
from kvpool.v1 import cache_pb2

from .cluster_picture import ClusterPicture
from .request_feed import RequestFeed

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

PICTURE_MS: Final = 200
"""Interval of the manager's pictures."""
MAX_SEQUENCES: Final = 200
"""Sequences of each worker in a picture."""
RETRY_SECONDS: Final = 0.5
"""Pause after an error that the client does not try again by itself, e.g. of a manager that is too old: somebody may replace it."""
SILENCE_SECONDS: Final = 15.0
"""Silence after which a browser is sent a comment, so that neither it nor a proxy takes the stream for dead."""


@dataclass(slots=True)
class PageViewer:
    """The stream of one browser, and the versions that it has seen."""

    version: int = 0
    manager_no: int = 0
    requests_version: int | None = None
    """Version of the requests that it has; None: it has none."""


class Hub:
    """The hub of one gateway. Its task runs while there is a viewer."""

    def __init__(
        self,
        follow: Callable[[], AsyncGenerator[WatchUpdate, None]],
        requests: RequestFeed | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """`follow` opens a stream of the pictures."""
        self._follow_pictures = follow
        self._requests = requests
        self._retry_seconds = retry_seconds
        self._picture = ClusterPicture()
        self._manager: dict[str, str] = {"state": "connecting", "message": ""}
        self._manager_no = 1
        self._changed = asyncio.Event()
        self._viewers: set[int] = set()
        self._following: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        """Number of browsers that look now."""
        return len(self._viewers)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events for one browser: first a whole picture, then changes. Each is made when the one before has been taken,
        so a slow browser gets a later picture and never a queue."""
        viewer = PageViewer()
        self._enter(viewer)
        try:
            while True:
                changed = self._changed
                for event in self._news(viewer):
                    yield event
                if changed.is_set():
                    continue
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._leave(viewer)

    def _news(self, viewer: PageViewer) -> list[bytes]:
        """Return the events that this browser has not seen, and note that it has seen them."""
        news: list[bytes] = []
        if viewer.manager_no != self._manager_no:
            viewer.manager_no = self._manager_no
            news.append(event_text("manager", json.dumps(self._manager).encode()))
        if viewer.version != self._picture.version:
            news.append(event_text("picture", self._picture.changes(viewer.version)))
            viewer.version = self._picture.version
        if self._requests is not None and viewer.requests_version != self._requests.version:
            news.append(event_text("requests", self._requests.changes(viewer.requests_version)))
            viewer.requests_version = self._requests.version
        return news

    def _enter(self, viewer: PageViewer) -> None:
        self._viewers.add(id(viewer))
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="gateway-pictures")
            if self._requests is not None:
                self._requests.start(self._wake)

    def _leave(self, viewer: PageViewer) -> None:
        self._viewers.discard(id(viewer))
        if not self._viewers and self._following is not None:
            self._following.cancel()
            self._following = None
            if self._requests is not None:
                self._requests.stop()
            # Nothing is kept while nobody looks: the next viewer must not see an old picture.
            self._picture = ClusterPicture()
            self._manager, self._manager_no = {"state": "connecting", "message": ""}, 1

    async def close(self) -> None:
        """End the manager's stream."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    async def _follow(self) -> None:
        while True:
            try:
                async with aclosing(self._follow_pictures()) as updates:
                    async for update in updates:
                        if isinstance(update, ManagerAway):
                            self._say("away", update.error.message)
                        elif isinstance(update, cache_pb2.Picture) and self._picture.apply(update):
                            self._say("up", "")
                            self._wake()
            except KvpoolError as error:
                if isinstance(error, ProtocolError):
                    log.exception("a picture of the manager contradicts itself")
                self._say("away", error.message)
            await asyncio.sleep(self._retry_seconds)

    def _say(self, state: str, message: str) -> None:
        said: dict[str, Any] = {"state": state, "message": message}
        if said != self._manager:
            self._manager = said
            self._manager_no += 1
            self._wake()

    def _wake(self) -> None:
        """Wake all viewers that wait now; later ones wait for the next change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def event_text(name: str, data: bytes) -> bytes:
    """Return one event of a stream. `data` has no line break."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
