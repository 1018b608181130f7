"""Takes pictures while somebody watches, and sends each viewer what has changed since its last picture.

A viewer that has its picture asks for the next one, so a slow viewer gets a later picture and never a queue. Times are on one grid:
the same picture serves viewers with the same interval, and now and then those with different ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from math import floor
from typing import Final, NamedTuple

import structlog

from kvpool.v1 import cache_pb2

from .. import status
from ..audits import Audits
from ..core.manager import CacheManager
from ..core.pictures import Pictures, Viewer, Wish
from . import picture_codec

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.manager")

_GRID_SECONDS: Final = 0.1
"""Grid for a viewer's first picture, and for its next one after a picture that came late."""
_SLACK_SECONDS: Final = 0.002
"""A picture that is due within this time is taken now."""


class _Wait(NamedTuple):
    """A viewer that waits for a picture: the loop time at which it is due, and its future result; None: taking it failed."""

    due: float
    picture: asyncio.Future[_Messages | None]


class PictureFeed:
    """The pictures of one manager, for all viewers."""

    def __init__(self, manager: CacheManager, audits: Audits) -> None:
        self._pictures = Pictures(manager)
        self._audits = audits
        self._waiting: dict[Viewer, _Wait] = {}
        self._taking: asyncio.Task[None] | None = None
        self._look_again = asyncio.Event()

    async def follow(self, wish: Wish, interval: float) -> AsyncGenerator[cache_pb2.WatchResponse, None]:
        """Yield the messages of a picture every `interval` seconds, without end. Raises status.ManagerUnavailable."""
        clock = asyncio.get_running_loop().time
        viewer = self._pictures.join(wish)
        due = _next_on_grid(clock(), _GRID_SECONDS)
        try:
            while True:
                messages = await self._next(viewer, due)
                for message in messages:
                    yield message
                del messages  # which may be large, and others may be done with it
                due = _next_on_grid(due + _SLACK_SECONDS, interval)
                if due < clock():
                    due = _next_on_grid(clock(), _GRID_SECONDS)
        finally:
            self._pictures.leave(viewer)
            if not self._pictures.num_viewers and self._taking is not None:
                self._taking.cancel()
                self._taking = None

    async def _next(self, viewer: Viewer, due: float) -> _Messages:
        picture: asyncio.Future[_Messages | None] = asyncio.get_running_loop().create_future()
        self._waiting[viewer] = _Wait(due, picture)
        self._look_again.set()
        if self._taking is None or self._taking.done():
            self._taking = asyncio.create_task(self._take_for_ever(), name="manager-pictures")
        try:
            messages = await picture
        finally:
            self._waiting.pop(viewer, None)
        if messages is None:
            raise status.ManagerUnavailable("a picture could not be taken; the manager's log says why: watch again")
        return messages

    async def _take_for_ever(self) -> None:
        try:
            while True:
                await self._wait_until_due()
                more = self._pictures.step()
                while more:
                    await asyncio.sleep(0)  # calls that have arrived meanwhile
                    more = self._pictures.step()
                self._take()
        except Exception:
            log.exception("picture failed")
            for wait in self._waiting.values():
                if not wait.picture.done():
                    wait.picture.set_result(None)

    async def _wait_until_due(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._look_again.clear()
            due = min((wait.due for wait in self._waiting.values()), default=None)
            if due is not None and due <= loop.time() + _SLACK_SECONDS:
                return
            timer = None if due is None else loop.call_at(due, self._look_again.set)
            try:
                await self._look_again.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _take(self) -> None:
        """Take a picture and give it to the viewers that are due."""
        self._pictures.take(self._audits.num_audits, self._audits.num_violations_of_last)
        now = asyncio.get_running_loop().time()
        shared: dict[int, _Messages] = {}
        for viewer, (due, picture) in list(self._waiting.items()):
            if picture.done():  # given up
                del self._waiting[viewer]
            elif due <= now + _SLACK_SECONDS:
                del self._waiting[viewer]
                change = self._pictures.show(viewer)
                # The change is kept until the next picture, so its id is its own.
                picture.set_result(shared.setdefault(id(change), _Messages(picture_codec.encode(change))))


class _Messages:
    """The messages of one picture. Each is encoded once for all viewers of the picture, when the first of them takes it."""

    def __init__(self, source: Iterator[cache_pb2.WatchResponse]) -> None:
        self._source = source
        self._made: list[cache_pb2.WatchResponse] = []

    def __iter__(self) -> Iterator[cache_pb2.WatchResponse]:
        place = 0
        while True:
            if place == len(self._made):
                message = next(self._source, None)
                if message is None:
                    return
                self._made.append(message)
            yield self._made[place]
            place += 1


def _next_on_grid(after: float, step: float) -> float:
    return (floor(after / step) + 1) * step
