"""How long a worker goes on asking a manager that knows another process under its name.

The other process may have ended, so that asking again helps: the refusal says when. If it is still known when three times that
time has passed, it lives and renews its lease. Then to go on asking would only hide a mistake, and the worker gives up.
"""

from __future__ import annotations

from typing import Final

PASSING: Final = frozenset({"STALE_INCARNATION", "WORKER_ELSEWHERE"})
"""Reasons for which a Register is refused that may pass."""
POLL_SECONDS: Final = 1.0
"""The longest time between two Registers: the other process may leave before its lease ends."""
_LEAST_SECONDS: Final = 0.2
_WAITS: Final = 3.0
"""The worker gives up after so many times the longest wait that it was told."""


class Patience:
    """Of one worker, over refusals that follow each other. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._longest_wait = _LEAST_SECONDS

    @property
    def is_tried(self) -> bool:
        """Whether the last Register was refused so."""
        return self._since is not None

    def restore(self) -> None:
        """A Register was answered in another way."""
        self._since, self._longest_wait = None, _LEAST_SECONDS

    def pause(self, wait_seconds: float, now: float) -> float | None:
        """Seconds to the next Register, after one that was refused with that wait; None: give up."""
        if self._since is None:
            self._since = now
        self._longest_wait = max(self._longest_wait, wait_seconds)
        if now - self._since >= _WAITS * self._longest_wait:
            return None
        return max(_LEAST_SECONDS, min(wait_seconds, POLL_SECONDS))
