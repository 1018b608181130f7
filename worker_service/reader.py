"""Whether the reader of a stream still takes what is there for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_NUM_LOOKS: Final = 4
"""At one wait. A process that was stopped or held up misses looks, and its readers are given the time again."""

WINDOW_BYTES: Final = 65_535
"""What HTTP/2 lets a sender send before the reader has taken anything, unless they agree on something else. A message of many times
that has so many times as long."""


class ReaderWatch:
    """Calls `on_slow` once if one message waits for its reader for `limit_seconds`. 0: never. In one event loop.

    A message waits while HTTP/2's flow control, or the operating system's buffer, has no room for it. Time in which there is
    nothing to send does not count.
    """

    def __init__(self, limit_seconds: float, on_slow: Callable[[], None]) -> None:
        self._limit_seconds = limit_seconds
        self._on_slow = on_slow
        self._timer: asyncio.TimerHandle | None = None
        self.is_slow = False
        """Whether `on_slow` was called."""

    def begin(self, num_bytes: int) -> None:
        """A message of `num_bytes` is handed to the transport."""
        if self._limit_seconds:
            self._look_again(self._limit_seconds * max(1, -(-num_bytes // WINDOW_BYTES)) / _NUM_LOOKS, _NUM_LOOKS)

    def end(self) -> None:
        """The transport has taken the message, or the stream is over. May be repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self, interval_seconds: float, num_looks: int) -> None:
        if num_looks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_seconds, self._look_again, interval_seconds, num_looks - 1)
        else:
            self._timer = None
            self.is_slow = True
            self._on_slow()
