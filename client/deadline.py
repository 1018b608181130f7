"""A point in time that a request must not pass, however many calls it takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import DeadlineExceeded


class Deadline:
    """The end of one request on the monotonic clock, which every call of the request gets."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        """The time-out that it was made from."""
        self.clock = clock
        self._started = clock()

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.clock() - self._started

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.seconds - self.elapsed())

    def exceeded(self, doing: str) -> DeadlineExceeded:
        """Return the error for a time-out that passed while `doing`."""
        return DeadlineExceeded(
            f"the time-out of {self.seconds:g} s passed while {doing}; give the call a larger timeout", reason="TIMEOUT"
        )

    def check(self, doing: str) -> None:
        """Raise DeadlineExceeded if no time is left for `doing`."""
        if self.remaining() == 0.0:
            raise self.exceeded(doing)
