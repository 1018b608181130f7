"""Streams the contents to followers, from their last event or from the whole state on.

A follower gets all events since its last look. They are in the journal's ring, which all followers share. A follower that is too
slow for the ring starts again from the whole state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from kvpool.v1 import cache_pb2

from ..core.contents import Contents
from ..core.manager import SWEEP_SLICE_NODES, CacheManager
from . import contents_codec

LOOK_SECONDS: Final = 0.05
"""Pause of a follower that has every event before it looks again."""
LINGER_SECONDS: Final = 30.0
"""Time for which the journal is kept after the last follower has left, since it may come back."""
_MESSAGE_EVENTS: Final = 256
"""Events in one message, which delays other calls for some 0.5 ms."""

Source = AsyncGenerator[cache_pb2.WatchResponse, None]


class ContentsFeed:
    """The contents of one manager, for all followers."""

    def __init__(self, manager: CacheManager, max_events: int) -> None:
        """`max_events` are kept for followers that are late."""
        self._manager = manager
        self._max_events = max_events
        self.num_followers = 0
        self._ending: asyncio.TimerHandle | None = None

    async def follow(self, options: cache_pb2.ContentsOptions) -> Source:
        """Yield the messages of one follower, without end."""
        manager = self._manager
        self.num_followers += 1
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        try:
            epoch, number = options.epoch, options.after
            while True:
                contents = manager.follow_contents(self._max_events)
                if epoch != manager.epoch or contents.since(number, 1) is None:
                    epoch = manager.epoch
                    async for message, number in _whole(contents, epoch):  # noqa: B007 (the last one is where to go on)
                        yield message
                    continue
                events = contents.since(number, _MESSAGE_EVENTS)
                if events:
                    number = events[-1].number
                    yield contents_codec.encode(epoch, events)
                else:
                    await asyncio.sleep(LOOK_SECONDS)
        finally:
            self.num_followers -= 1
            if not self.num_followers:
                self._ending = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._end)

    def _end(self) -> None:
        self._ending = None
        self._manager.end_contents()


async def _whole(contents: Contents, epoch: int) -> AsyncGenerator[tuple[cache_pb2.WatchResponse, int], None]:
    """Yield the messages of the whole state, each with the number of the last event that it includes. Ends early if the follower is
    too slow for the ring; it then has to start again."""
    more = True
    while more:
        more = contents.list_some(SWEEP_SLICE_NODES)
        await asyncio.sleep(0)  # calls that have arrived meanwhile
    whole = contents.whole()
    number = whole.number
    begins = True
    while part := whole.part(_MESSAGE_EVENTS):
        yield contents_codec.encode(epoch, part, whole_begins=begins), number
        begins = False
        await asyncio.sleep(0)
    # What is right for one moment: this one.
    target = contents.last_number
    while number < target:
        events = contents.since(number, min(_MESSAGE_EVENTS, target - number))
        if events is None:
            return
        number = events[-1].number
        yield contents_codec.encode(epoch, events, whole_begins=begins), number
        begins = False
    yield contents_codec.encode(epoch, (), whole_begins=begins, whole_ends=True), number
