"""A point in time that a request must not pass, however many calls it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of one request on the monotonic clock. Immutable; safe to hand to every call of the request."""

    seconds: float
    """The time-out that it was made from."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    started: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "started", self.clock())

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.clock() - self.started

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
