"""Limits a log line about something that a peer can cause at will to one a minute, with the count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

INTERVAL_SECONDS: Final = 60.0


class RareLine:
    """Logs the first event at once. Events within the next minute are counted, and logged at its end with the details of the last
    one. Needs a running event loop."""

    def __init__(
        self,
        log: structlog.stdlib.BoundLogger,
        event: str,
        *,
        interval_seconds: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._event = event
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._count = 0
        self._details: dict[str, Any] = {}
        self._quiet_until = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def note(self, **details: Any) -> None:
        """Count the event once more."""
        self._count += 1
        self._details = details
        remaining = self._quiet_until - self._clock()
        if remaining <= 0:
            self._write()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(remaining, self._write)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._log.warning(self._event, count=self._count, **self._details)
        self._count = 0
        self._quiet_until = self._clock() + self._interval_seconds
