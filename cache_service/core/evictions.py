"""Names of evicted contents, so that Explain can say that something was cached once. Bounded, and kept whether anybody asks or not.

The name of a content is its block hash, which depends on the root too, so that no name says anything of another root. Names of
different contents can be equal by chance: what is found here was *probably* evicted.

To note an eviction is the hottest line of a full cache, to look for one is rare. So names are only appended, to one array of
8 bytes each, and looking for one walks through all of them at the speed of memory. Causes are packed as well: objects that live
long among those that come and go would slow all calls down.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from struct import Struct
from typing import Final, NamedTuple

from .messages import Root, SequenceKey

SEGMENT_NAMES = 1 << 13
"""Names that are dropped at a time, at most."""

MAX_OCCURRENCES = 64
"""Evictions of one name that are looked at in one segment, at most: other workers may have evicted the same content."""

_NAME_BYTES: Final = 8

_CAUSE: Final = Struct("<QQdIIII")
"""Index of the first name, signature of the pool, time, attempt, round, begin and length of the sequence_id; 0: nobody's."""


class Evicted(NamedTuple):
    """What is known of one eviction."""

    at: float
    """Monotonic seconds of the last tick, heartbeat or Register before it."""
    key: SequenceKey | None
    """The sequence that needed the block; None: a reserve did."""
    salt: str
    """That sequence's."""


class _Segment(NamedTuple):
    """Names in the order of their eviction, and the causes of runs of them."""

    names: bytes
    causes: bytes | bytearray
    ids: bytes | bytearray
    salts: list[str]

    def search(self, name: bytes, found: dict[int, Evicted]) -> None:
        """Add the latest eviction of that name by pools that have none in `found`."""
        end = len(self.names)
        for _ in range(MAX_OCCURRENCES):
            end = self.names.rfind(name, 0, end)
            if end < 0:
                return
            index, rest = divmod(end, _NAME_BYTES)
            if not rest:
                signature, evicted = self._cause_of(index)
                found.setdefault(signature, evicted)
            end += _NAME_BYTES - 1

    def _cause_of(self, index: int) -> tuple[int, Evicted]:
        which = bisect_right(range(len(self.salts)), index, key=lambda number: self._cause(number)[0]) - 1
        _, signature, at, attempt, round_, begin, length = self._cause(which)
        key = SequenceKey(self.ids[begin : begin + length].decode(), attempt, round_) if length else None
        return signature, Evicted(at, key, self.salts[which])

    def _cause(self, number: int) -> tuple[int, int, float, int, int, int, int]:
        return _CAUSE.unpack_from(self.causes, number * _CAUSE.size)


class EvictionMemory:
    """The latest evictions of all pools: the last `most` of them, give or take an eighth, and those of the grant under way.

    Whoever makes a pool evict says before for whom, with `begin`.
    """

    def __init__(self, most: int) -> None:
        self.names = array("Q")
        """The newest segment: pools append to it. Always the same array."""
        self._now = 0.0
        self._causes = bytearray()
        self._ids = bytearray()
        self._salts: list[str] = []
        self._next: tuple[int, SequenceKey | None, Root | None] = (0, None, None)
        self._num_settled = 0
        """Names that have their cause."""
        self._segment = max(1, min(SEGMENT_NAMES, most // 8))
        self._older: deque[_Segment] = deque(maxlen=max(0, most // self._segment - 1))

    def __len__(self) -> int:
        """Names kept."""
        return len(self.names) + sum(len(segment.names) // _NAME_BYTES for segment in self._older)

    def begin(self, pool_signature: int, key: SequenceKey | None, root: Root | None) -> None:
        """What is evicted from now on is evicted by this pool for this sequence; None: for its reserve."""
        if len(self.names) != self._num_settled:
            self._settle()
        self._next = pool_signature, key, root

    def set_time(self, now: float) -> None:
        """Evictions up to now happened before this time, later ones after it. In seconds of one monotonic clock."""
        if len(self.names) != self._num_settled:
            self._settle()
        self._now = now

    def _settle(self) -> None:
        """Give the names since the last `begin` their cause."""
        signature, key, root = self._next
        sequence_id, attempt, round_ = key or ("", 0, 0)
        id_bytes = sequence_id.encode()
        self._causes += _CAUSE.pack(
            self._num_settled, signature, self._now, attempt, round_, len(self._ids), len(id_bytes)
        )
        self._ids += id_bytes
        self._salts.append("" if root is None else root.tenant_salt)
        self._num_settled = len(self.names)
        if self._num_settled >= self._segment:
            self._older.append(self._newest())
            del self.names[:]
            self._causes, self._ids, self._salts, self._num_settled = bytearray(), bytearray(), [], 0

    def _newest(self) -> _Segment:
        return _Segment(self.names.tobytes(), self._causes, self._ids, self._salts)

    def find(self, block_hash: int) -> dict[int, Evicted]:
        """The latest eviction of that name by each pool that is remembered to have evicted it, by the pool's signature."""
        if len(self.names) != self._num_settled:
            self._settle()
        name = array("Q", (block_hash,)).tobytes()
        found: dict[int, Evicted] = {}
        for segment in (self._newest(), *reversed(self._older)):
            segment.search(name, found)
        return found
