"""How long a worker retries a Register that is refused because another process has its name.

The other process may have ended, and then its lease ends too: the refusal has the time. If the name is still taken after three
times that time, the other process renews its lease. More retries would hide a mistake, so the worker gives up.
"""

from __future__ import annotations

from typing import Final

PASSING: Final = frozenset({"STALE_INCARNATION", "WORKER_ELSEWHERE"})
"""Reasons of a refused Register that may pass."""
POLL_SECONDS: Final = 1.0
"""The longest time between two Registers: the other process may leave before its lease ends."""
_LEAST_SECONDS: Final = 0.2
_WAITS: Final = 3.0
"""The worker gives up after this many times the longest wait in a refusal."""


class Patience:
    """State over consecutive refusals. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._longest_wait = _LEAST_SECONDS

    @property
    def is_waiting(self) -> bool:
        """Whether the last Register was refused for such a reason."""
        return self._since is not None

    def restore(self) -> None:
        """Note that a Register had another outcome."""
        self._since, self._longest_wait = None, _LEAST_SECONDS

    def pause(self, wait_seconds: float, now: float) -> float | None:
        """Seconds to the next Register, after a refusal with `wait_seconds`; None: give up."""
        if self._since is None:
            self._since = now
        self._longest_wait = max(self._longest_wait, wait_seconds)
        if now - self._since >= _WAITS * self._longest_wait:
            return None
        return max(_LEAST_SECONDS, min(wait_seconds, POLL_SECONDS))
