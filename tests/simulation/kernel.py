"""The one queue of everything that is going to happen, over all processes, in virtual time."""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections.abc import Callable
from typing import Any


class Kernel:
    """Virtual time and its events. Equal times are ordered by the seed. One seed gives one run."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        """Seconds since the beginning, by the clock on the wall that no process sees."""
        self.num_events = 0
        self.is_traced = is_traced
        self.lines: list[str] = []
        self._events: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._ties = self.random("ties")
        self._digest = hashlib.blake2b(digest_size=16)

    def random(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own, so that one purpose does not shift another's."""
        return random.Random(f"{self.seed}/{purpose}")

    def at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        """Let something happen at a time, not before now."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._ties.random(), self._count, callback, args))

    def after(self, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, callback, *args)

    def step(self) -> bool:
        """The next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, _, callback, args = heapq.heappop(self._events)
        self.num_events += 1
        callback(*args)
        return True

    def note(self, what: str, data: bytes = b"") -> None:
        """Something that every replay of the seed must do again, at the same time."""
        self._digest.update(struct.pack("<d", self.now))
        self._digest.update(what.encode())
        self._digest.update(data)

    def trace(self, who: str, what: str) -> None:
        """A line of the readable trace. Callers ask `is_traced` first where making the line costs something."""
        if self.is_traced:
            self.lines.append(f"{self.now:10.4f}  {who:<10} {what}")

    def digest(self) -> str:
        return self._digest.hexdigest()
