"""Names of evicted contents, so that Explain can say that something was cached once. Bounded, and kept whether anybody asks or not.

A content is named by its block hash and its pool: the block hash depends on the root, so that no name says anything of another
root. Names of different contents can be equal by chance, so what is found here was *probably* evicted.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .messages import Root, SequenceKey

SEGMENT_NAMES = 1 << 14
"""Names that are dropped at a time, at most: 0.5 ms."""

_NOBODY = (0.0, None, None)


class Evicted(NamedTuple):
    """What is known of one eviction."""

    at: float
    """Monotonic seconds of the last tick, heartbeat or Register before it."""
    key: SequenceKey | None
    """The sequence that needed the block; None: a reserve did."""
    root: Root | None
    """That sequence's root."""


class EvictionMemory:
    """The latest evictions of all pools: the last `most` of them, give or take an eighth, and those of the grant under way.

    A pool that evicts writes `names[name] = cause` itself: it is the hottest line of a full cache. Whoever makes it evict says
    before for whom, with `begin`.
    """

    def __init__(self, most: int) -> None:
        self.now = 0.0
        """Set by the manager whenever it hears what the time is."""
        self.names: dict[int, tuple[float, SequenceKey | None, Root | None]] = {}
        """The newest segment."""
        self.cause: tuple[float, SequenceKey | None, Root | None] = _NOBODY
        """Why the next blocks are evicted, as in Evicted."""
        self._segment = max(1, min(SEGMENT_NAMES, most // 8))
        self._older: deque[dict[int, tuple[float, SequenceKey | None, Root | None]]] = deque(
            maxlen=max(0, most // self._segment - 1)
        )

    def __len__(self) -> int:
        """Names kept; one that is in two segments counts twice."""
        return len(self.names) + sum(map(len, self._older))

    def begin(self, key: SequenceKey | None, root: Root | None) -> None:
        """What is evicted from now on is evicted for this sequence; None: for a reserve."""
        if len(self.names) >= self._segment:
            self._older.append(self.names)
            self.names = {}
        self.cause = self.now, key, root

    def find(self, name: int) -> Evicted | None:
        """The latest eviction of that name, if it is remembered."""
        for segment in (self.names, *reversed(self._older)):
            found = segment.get(name)
            if found is not None:
                return Evicted(*found)
        return None
