"""The log of requests for browsers: changes are collected for half a second, and all browsers share what they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Final

from ..request_log import RequestLog

COLLECT_SECONDS: Final = 0.5


class RequestFeed:
    """Costs nothing while nobody looks."""

    def __init__(self, log: RequestLog, *, collect_seconds: float = COLLECT_SECONDS) -> None:
        self._log = log
        self._collect_seconds = collect_seconds
        self._wake: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._texts: dict[int | None, bytes] = {}
        self.version = log.version
        """The log's, as of the last announcement."""

    def start(self, wake: Callable[[], None]) -> None:
        """Somebody looks: call `wake` when there is something new."""
        self._wake = wake
        self._publish()
        self._log.on_change = self._on_change

    def stop(self) -> None:
        """Nobody looks any more."""
        self._log.on_change = None
        self._wake = None
        self._texts.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def changes(self, since: int | None) -> bytes:
        """JSON of the answers that have changed after version `since`, with the numbers of all that are kept; None: of all."""
        if since not in self._texts:
            changed = [record.as_object() for record in self._log.changed_since(since or 0)]
            found = {"whole": since is None, "requests": changed, "numbers": self._log.numbers}
            self._texts[since] = json.dumps(found, separators=(",", ":")).encode()
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
