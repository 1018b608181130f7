"""Detects a reader of a stream that takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_NUM_CHECKS: Final = 4
"""Timer ticks in one wait. A process that was stopped misses ticks, so its readers get that time back."""

WINDOW_BYTES: Final = 65_535
"""HTTP/2's default flow-control window. A message n times as large may wait n times as long."""


class ReaderWatch:
    """Calls `on_slow` once if a message waits for its reader for `limit_seconds`. 0: never. For one event loop.

    A message waits while HTTP/2's flow control, or the operating system's buffer, has no room for it. Time without a message does
    not count.
    """

    def __init__(self, limit_seconds: float, on_slow: Callable[[], None]) -> None:
        self._limit_seconds = limit_seconds
        self._on_slow = on_slow
        self._timer: asyncio.TimerHandle | None = None
        self.is_slow = False
        """Whether `on_slow` was called."""

    def begin(self, num_bytes: int) -> None:
        """Note that a message of `num_bytes` is handed to the transport."""
        if self._limit_seconds:
            self._check_in(self._limit_seconds * max(1, -(-num_bytes // WINDOW_BYTES)) / _NUM_CHECKS, _NUM_CHECKS)

    def end(self) -> None:
        """Note that the transport has taken the message, or the stream is over. May be repeated."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_in(self, interval_seconds: float, num_left: int) -> None:
        if num_left:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(interval_seconds, self._check_in, interval_seconds, num_left - 1)
        else:
            self._timer = None
            self.is_slow = True
            self._on_slow()
