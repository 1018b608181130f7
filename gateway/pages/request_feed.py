"""Sends the log of requests to browsers: changes are collected for half a second, and all browsers share the encoded events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Final

from ..request_log import RequestLog

COLLECT_SECONDS: Final = 0.5


class RequestFeed:
    """The changes of the log, for browsers. Costs nothing while nobody looks."""

    def __init__(self, log: RequestLog, *, collect_seconds: float = COLLECT_SECONDS) -> None:
        self._log = log
        self._collect_seconds = collect_seconds
        self._wake: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._texts: dict[int | None, bytes] = {}
        self.version = log.version
        """Version of the log at the last announcement."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to call `wake` when there is something new, because somebody looks."""
        self._wake = wake
        self._publish()
        self._log.on_change = self._on_change

    def stop(self) -> None:
        """Stop, because nobody looks any more."""
        self._log.on_change = None
        self._wake = None
        self._texts.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def changes(self, since: int | None) -> bytes:
        """Return JSON of the answers that have changed after version `since` (None: of all), with the numbers of all kept
        answers."""
        if since not in self._texts:
            changed = [record.as_object() for record in self._log.changed_since(since or 0)]
            message = {"whole": since is None, "requests": changed, "numbers": self._log.numbers}
            self._texts[since] = json.dumps(message, separators=(",", ":")).encode()
        return self._texts[since]

    def _on_change(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._collect_seconds, self._announce)

    def _announce(self) -> None:
        self._timer = None
        self._publish()
        if self._wake is not None:
            self._wake()

    def _publish(self) -> None:
        self.version = self._log.version
        self._texts.clear()
