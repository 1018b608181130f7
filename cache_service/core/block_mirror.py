"""A copy of what pictures show of a session's blocks, brought up to date block by block as they change.

No block that has not changed is looked at, so a picture of a large pool costs what has changed, and the copy is exact at the moment
at which `step` finds nothing left to do. Which blocks have changed in the last pictures is kept, for viewers that have missed some.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Container
from typing import NamedTuple

from .block_changes import BlockChanges
from .block_pool import CACHED, FREE, HELD
from .prefix_tree import Node, RootNode
from .salts import SaltNumbers
from .session import Session

SLICE_BLOCKS = 512
"""Blocks that one step looks at: some 0.3 ms."""

MAX_LISTED_BLOCKS = 1 << 14
"""Changed blocks of one pool that are listed one by one. If there are more, a copy of the whole pool is sent."""


class Columns(NamedTuple):
    """Some blocks of a pool, as lists of equal length."""

    ids: tuple[int, ...] | None
    """Their block ids; None: 0, 1, 2, …"""
    states: bytes
    """A State each."""
    ref_counts: array[int]
    last_used: array[int]
    """Number of the picture in which the block was granted or hit last, modulo 2^32; 0: in none since it is mirrored."""
    salt_numbers: array[int]

    @property
    def num_blocks(self) -> int:
        """Blocks in the lists."""
        return len(self.states)

    def part(self, begin: int, end: int) -> Columns:
        """The entries `begin` … `end` − 1. Of columns without ids, the first of them is the block `begin`."""
        span = slice(begin, end)
        return Columns(
            None if self.ids is None else self.ids[span],
            self.states[span],
            self.ref_counts[span],
            self.last_used[span],
            self.salt_numbers[span],
        )


class BlockMirror:
    """The mirror of the pool of one group. While it exists the pool notes its changes; `close` ends that."""

    def __init__(self, session: Session, group: int, salts: SaltNumbers, number: int) -> None:
        """`number`: of the first picture that shows the blocks."""
        self._session = session
        self._group = session.by_slot[group]
        self._pool = self._group.pool
        self._salts = salts
        self._changes = self._pool.changes = BlockChanges()
        self._states = bytearray()
        self._ref_counts = array("H")
        self._last_used = array("I")
        self._salt_numbers = array("H")
        self._num_first = self._pool.num_known
        """Blocks that were known when the mirror began; all of them are to be looked at once."""
        self._next_first = 1
        self._changed: set[int] = set()
        """Blocks that have changed since the last picture; not those that the mirror began with."""
        self._listed: deque[tuple[int, set[int]]] = deque()
        """Number of the picture, blocks that have changed in it; those of some pictures before are not kept."""
        self._num_listed = 0
        self._listed_after = number
        self._columns: Columns | None = None
        """All blocks, of the last picture, once somebody needs them."""

    def close(self) -> None:
        """The pool notes its changes no longer."""
        self._pool.changes = None

    def step(self, number: int) -> bool:
        """Look at some blocks that have changed, for the picture `number`; returns whether more are left. The blocks of a session
        that has ended are not looked at any more."""
        if self._session.retired:
            return False
        changes = self._changes
        self._grow()
        if self._next_first < self._num_first:
            begin = self._next_first
            self._next_first = min(begin + SLICE_BLOCKS, self._num_first)
            self._copy(range(begin, self._next_first))
            return True
        if changes.used:
            used = _take(changes.used, SLICE_BLOCKS)
            for block in used:
                self._last_used[block] = number & 0xFFFFFFFF
            changes.others.difference_update(used)
            self._copy(used)
            self._changed.update(used)
        elif changes.others:
            others = _take(changes.others, SLICE_BLOCKS)
            self._copy(others)
            self._changed.update(others)
        return bool(changes.used or changes.others)

    def take(self, number: int, oldest: int) -> None:
        """Take the picture `number`; changes up to the picture `oldest` are not needed any more."""
        self._columns = None
        while self.step(number):
            pass
        if self._changed:
            self._listed.append((number, self._changed))
            self._num_listed += len(self._changed)
            self._changed = set()
        most = min(max(4096, len(self._states) // 8), MAX_LISTED_BLOCKS)
        while self._listed and (self._num_listed > most or self._listed[0][0] <= oldest):
            self._listed_after, dropped = self._listed.popleft()
            self._num_listed -= len(dropped)

    def since(self, seen: int) -> Columns | None:
        """Return the blocks that have changed after the picture `seen`, or all if that is not known any more; None: no block
        has."""
        if seen < self._listed_after:
            if self._columns is None:
                self._columns = Columns(
                    None, bytes(self._states), self._ref_counts[:], self._last_used[:], self._salt_numbers[:]
                )
            return self._columns
        ids = set().union(*(blocks for number, blocks in self._listed if number > seen))
        if not ids:
            return None
        return Columns(
            tuple(ids),
            bytes(map(self._states.__getitem__, ids)),
            array("H", map(self._ref_counts.__getitem__, ids)),
            array("I", map(self._last_used.__getitem__, ids)),
            array("H", map(self._salt_numbers.__getitem__, ids)),
        )

    def _grow(self) -> None:
        """Make entries for the blocks that the pool has made records of since."""
        count = self._pool.num_known - len(self._states)
        if count:
            self._states += bytes([FREE]) * count
            self._ref_counts.frombytes(bytes(2 * count))
            self._last_used.frombytes(bytes(4 * count))
            self._salt_numbers.frombytes(bytes(2 * count))

    def _copy(self, blocks: Collection[int]) -> None:
        states, ref_counts, salt_numbers = self._states, self._ref_counts, self._salt_numbers
        known: dict[Node, int] = {}
        pending = blocks if isinstance(blocks, range) else frozenset(blocks)
        unsealed: dict[int, int] | None = None
        for block, state, ref_count, node in self._pool.records(blocks):
            states[block] = state
            ref_counts[block] = min(ref_count, 65_535)
            if node is not None:
                salt_numbers[block] = self._salt_of(node, known, pending)
            elif state == HELD:
                if unsealed is None:
                    unsealed = self._salts_of_unsealed()
                salt_numbers[block] = unsealed.get(block, 0)
            else:
                assert state != CACHED, "a cached block holds something"
                salt_numbers[block] = 0

    def _salt_of(self, node: Node, known: dict[Node, int], pending: Container[int]) -> int:
        """The salt's number of a chain: that of the nearest ancestor whose block is mirrored, or of the root. `known` remembers the
        nodes on the way, so that a chain is walked once for all blocks that are `pending`."""
        path: list[Node] = []
        at: Node | None = node
        while True:
            assert at is not None, "a node is cut off from its root"
            found = known.get(at)
            if found is None and isinstance(at, RootNode):
                found = self._salts.number(at.key[0].tenant_salt)
            if found is None and path:
                block = self._pool.copy_of(at)
                if block and block not in pending and self._is_current(block):
                    found = self._salt_numbers[block]
            if found is not None:
                break
            path.append(at)
            at = at.parent
        for passed in path:
            known[passed] = found
        return found

    def _is_current(self, block: int) -> bool:
        """Whether the mirror's entry of the block is as the pool's."""
        if block < self._num_first and block >= self._next_first:
            return False
        return block not in self._changes.used and block not in self._changes.others

    def _salts_of_unsealed(self) -> dict[int, int]:
        """Return the number of the salt by block, for each block in a table that is not sealed yet. Such a block is in one table
        only."""
        found: dict[int, int] = {}
        for sequence in self._session.sequences.values():
            number = self._salts.number(sequence.root.key[0].tenant_salt)
            for block in self._group.unsealed(sequence):
                found[block] = number
        return found


def _take(blocks: set[int], most: int) -> list[int]:
    """Remove up to `most` from the set, and return them."""
    return [blocks.pop() for _ in range(min(most, len(blocks)))]
