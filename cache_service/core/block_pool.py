"""The blocks of one worker session, as a struct of arrays, and the free list that is also the prefix cache.

The free list is an intrusive doubly linked list through `_next` and `_previous`; block 0, the null block, is its sentinel. Its
head is granted next. Every operation is O(1) in the number of blocks. A block on the list is *free* (holds nothing) or *cached*
(sealed, still a hit); off the list it is *reserved* (granted, bound to no sequence) or *held* (in ref_count tables).

The pool keeps its own counts and states; it does not know sequences. Callers keep the tree and the pool in step through
`seal`, `take` and `release` alone.

What is only told of granted blocks is kept as far as blocks were ever granted: a pool of millions is made in a few milliseconds.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from enum import IntEnum
from itertools import chain, repeat

from .messages import BlockCounts
from .prefix_tree import Node, PrefixTree

_NUMBERS_PER_PIECE = 1 << 16

_GROWTH_BLOCKS = 1 << 14
"""Room is made for so many further blocks at a time."""


def counting(count: int) -> array[int]:
    """The numbers 0 … count − 1. Many are written byte by byte, in pieces: `array("I", range(count))` takes 20 ms a million."""
    if count < _NUMBERS_PER_PIECE // 16:
        return array("I", range(count))
    places = range(4) if sys.byteorder == "little" else range(3, -1, -1)
    piece = bytearray(4 * _NUMBERS_PER_PIECE)
    piece[places[0] :: 4] = bytes(range(256)) * 256
    piece[places[1] :: 4] = b"".join(bytes((byte,)) * 256 for byte in range(256))
    numbers = array("I")
    for high in range(-(-count // _NUMBERS_PER_PIECE)):
        piece[places[2] :: 4] = bytes((high & 0xFF,)) * _NUMBERS_PER_PIECE
        piece[places[3] :: 4] = bytes((high >> 8,)) * _NUMBERS_PER_PIECE
        numbers.frombytes(memoryview(piece)[: 4 * (count - high * _NUMBERS_PER_PIECE)])
    return numbers


class State(IntEnum):
    """What a block is to the manager."""

    FREE = 0
    CACHED = 1
    HELD = 2
    RESERVED = 3


FREE, CACHED, HELD, RESERVED = (int(state) for state in State)


class BlockPool:
    """`num_blocks` blocks of `block_size` token slots; block 0 is never granted."""

    def __init__(self, num_blocks: int, block_size: int, tree: PrefixTree) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.retired = False
        """Set when the session ends: look-ups ignore the pool from then on, a sweep takes its copies out of the tree."""
        self.num_evicted = 0
        """Cached blocks whose content was dropped for a grant."""
        self.signature = tree.new_signature()
        """See Copies."""
        self._tree = tree
        self._state = bytearray(num_blocks)
        self._num_known = 0
        """Blocks that `_ref_count`, `_generation` and `_node` have room for. All behind them were never granted."""
        self._ref_count = array("I")
        self._generation = array("Q")
        self._node: list[Node | None] = []
        self._next = counting(num_blocks + 1)
        del self._next[0]
        self._next[num_blocks - 1] = 0
        self._previous = counting(num_blocks - 1)
        self._previous.insert(0, num_blocks - 1)
        self._duplicates: dict[Node, dict[int, None]] = {}
        """Held blocks that hold the same content as the copy that serves hits; by node, oldest first."""
        self._num_free = num_blocks - 1
        self._num_cached = 0
        self._num_reserved = 0
        self._num_shared = 0

    # -- looking

    @property
    def capacity(self) -> int:
        """Blocks that can ever be granted."""
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be granted now: free and cached."""
        return self._num_free + self._num_cached

    @property
    def num_reserved(self) -> int:
        """Blocks granted to the worker and bound to no sequence."""
        return self._num_reserved

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        held = self.capacity - self._num_free - self._num_cached - self._num_reserved
        return BlockCounts(
            self.capacity, self._num_free, self._num_cached, held, self._num_reserved, 0, self._num_shared
        )

    def state(self, block: int) -> State:
        """State of a block; the null block counts as free."""
        return State(self._state[block])

    def ref_count(self, block: int) -> int:
        """Tables of live sequences that name the block."""
        try:
            return self._ref_count[block]
        except IndexError:
            return 0

    def generation(self, block: int) -> int:
        """Stamp of the call that granted the block last; 0 if none did."""
        try:
            return self._generation[block]
        except IndexError:
            return 0

    def node(self, block: int) -> Node | None:
        """What a sealed block holds; None if the block is not sealed."""
        try:
            return self._node[block]
        except IndexError:
            return None

    def is_free(self, block: int) -> bool:
        """Whether the block lies on the free list and holds nothing."""
        return self._state[block] == FREE

    def is_cached(self, block: int) -> bool:
        """Whether the block lies on the free list and is still a hit."""
        return self._state[block] == CACHED

    def is_reserved(self, block: int, generation: int) -> bool:
        """Whether the block belongs to the reserve by the grant with that stamp."""
        return 0 < block < self.num_blocks and self._state[block] == RESERVED and self._generation[block] == generation

    def free_list(self) -> Iterator[int]:
        """Blocks from the next to be granted to the last. The list must not change meanwhile."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    # -- looking, for audits

    def rows(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int, Node | None]]:
        """Of the blocks `begin` … `end` − 1: block, state, ref_count, generation, node. As they are when it is called."""
        span = slice(begin, end)
        return zip(
            range(begin, end),
            self._state[span],
            chain(self._ref_count[span], repeat(0)),
            chain(self._generation[span], repeat(0)),
            chain(self._node[span], repeat(None)),
            strict=False,
        )

    def photograph_states(self, into: bytearray) -> None:
        """Copy the state of every block, as it is now."""
        into[:] = self._state

    def photograph_ref_counts(self, into: array[int]) -> None:
        """Copy the ref_count of every block that was ever granted, as it is now; the others have none."""
        memoryview(into)[: self._num_known] = memoryview(self._ref_count)

    def photograph_list(self, into: array[int]) -> None:
        """Copy what follows each block on the free list, as it is now; block 0 is before its head and behind its tail."""
        memoryview(into)[:] = memoryview(self._next)

    def is_linked_back(self, block: int) -> bool:
        """Whether a block of the free list, or block 0, points back at the block of the list that points at it."""
        before = self._previous[block]
        return (
            before < self.num_blocks
            and self._next[before] == block
            and (before == 0 or self._state[before] in (FREE, CACHED))
        )

    def duplicated(self) -> list[Node]:
        """Nodes that more than one block of this pool holds, as of now."""
        return list(self._duplicates)

    def duplicates_of(self, node: Node) -> tuple[int, ...]:
        """The blocks that hold `node` beside the copy that serves hits, oldest first."""
        return tuple(self._duplicates.get(node, ()))

    def is_duplicate(self, block: int, node: Node) -> bool:
        """Whether the block is kept as a further one that holds `node`, beside the copy that serves hits."""
        return block in self._duplicates.get(node, ())

    # -- the list

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _push_head(self, block: int) -> None:
        first = self._next[0]
        self._next[0] = self._previous[first] = block
        self._next[block] = first
        self._previous[block] = 0

    def _push_tail(self, block: int) -> None:
        last = self._previous[0]
        self._previous[0] = self._next[last] = block
        self._previous[block] = last
        self._next[block] = 0

    # -- granting

    def _take(self, count: int, generation: int) -> list[int]:
        """Take `count` blocks off the head of the list, evicting what they hold. The caller sets their states."""
        follows, states = self._next, self._state
        blocks = []
        block = follows[0]
        for _ in range(count):
            assert block, "taken from an empty free list"
            if block >= self._num_known:
                self._make_room(block)
            assert generation > self._generation[block], "generations must grow"
            self._generation[block] = generation
            if states[block] == CACHED:
                self._num_cached -= 1
                self.num_evicted += 1
                self._forget(block)
            else:
                self._num_free -= 1
            blocks.append(block)
            block = follows[block]
        follows[0] = block
        self._previous[block] = 0
        return blocks

    def _make_room(self, block: int) -> None:
        """For what is kept of granted blocks, up to `block` and some more."""
        count = min(max(block + 1, self._num_known + _GROWTH_BLOCKS), self.num_blocks) - self._num_known
        self._ref_count.frombytes(bytes(4 * count))
        self._generation.frombytes(bytes(8 * count))
        self._node += [None] * count
        self._num_known += count

    def take_held(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to a table: ref_count 1. The caller has checked num_available."""
        blocks = self._take(count, generation)
        for block in blocks:
            self._state[block] = HELD
            self._ref_count[block] = 1
        return blocks

    def take_reserved(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to the reserve. The caller has checked num_available."""
        blocks = self._take(count, generation)
        for block in blocks:
            self._state[block] = RESERVED
        self._num_reserved += count
        return blocks

    def bind(self, block: int) -> None:
        """A reserved block becomes an entry of a table."""
        assert self._state[block] == RESERVED
        self._state[block] = HELD
        self._ref_count[block] = 1
        self._num_reserved -= 1

    def unreserve(self, block: int) -> None:
        """A reserved block goes back to the head of the free list."""
        assert self._state[block] == RESERVED
        self._state[block] = FREE
        self._num_reserved -= 1
        self._num_free += 1
        self._push_head(block)

    def pin(self, block: int) -> None:
        """A hit: one more table names the sealed block."""
        count = self._ref_count[block]
        if count == 0:
            assert self._state[block] == CACHED
            self._unlink(block)
            self._num_cached -= 1
            self._state[block] = HELD
        elif count == 1:
            self._num_shared += 1
        self._ref_count[block] = count + 1

    def release(self, block: int) -> None:
        """One table less names the block. At zero it goes to the tail if it serves hits, else, emptied, to the head."""
        count = self._ref_count[block] - 1
        assert count >= 0, "released more often than held"
        self._ref_count[block] = count
        if count:
            if count == 1:
                self._num_shared -= 1
            return
        node = self._node[block]
        if node is not None and node.copy_in(self) == block:
            self._state[block] = CACHED
            self._num_cached += 1
            self._push_tail(block)
            return
        if node is not None:
            self._forget(block)
        self._state[block] = FREE
        self._num_free += 1
        self._push_head(block)

    # -- content

    def seal(self, block: int, node: Node) -> None:
        """The held block now holds `node`, for good. The first one of a node in this pool serves its hits."""
        assert self._node[block] is None
        self._node[block] = node
        if node.copy_in(self):
            self._duplicates.setdefault(node, {})[block] = None
        else:
            node.add_copy(self, block)

    def _forget(self, block: int) -> None:
        """Take a block's content out of the tree; another block that holds the same takes over."""
        node = self._node[block]
        assert node is not None
        self._node[block] = None
        others = self._duplicates.get(node)
        if node.copy_in(self) != block:
            assert others is not None
            del others[block]
        else:
            node.drop_copy(self)
            if others:
                oldest = next(iter(others))
                del others[oldest]
                node.add_copy(self, oldest)
            else:
                self._tree.prune(node)
        if others is not None and not others:
            del self._duplicates[node]

    # -- what a worker reports of an earlier session

    def restore_cached(self, block: int, generation: int, node: Node) -> None:
        """A free block holds `node` and serves its hits, of which the pool has no copy yet; most recently used for now."""
        self._restore(block, generation)
        self._state[block] = CACHED
        self._num_cached += 1
        self._push_tail(block)
        self.seal(block, node)

    def restore_held(self, block: int, generation: int) -> None:
        """A free block is named by one table."""
        self._restore(block, generation)
        self._state[block] = HELD
        self._ref_count[block] = 1

    def restore_reserved(self, block: int, generation: int) -> None:
        """A free block is in the worker's reserve."""
        self._restore(block, generation)
        self._state[block] = RESERVED
        self._num_reserved += 1

    def _restore(self, block: int, generation: int) -> None:
        assert self._state[block] == FREE
        if block >= self._num_known:
            self._make_room(block)
        self._unlink(block)
        self._num_free -= 1
        self._generation[block] = generation

    def touch(self, block: int) -> None:
        """Make a cached block the most recently used one."""
        assert self._state[block] == CACHED
        self._unlink(block)
        self._push_tail(block)

    # -- the end of a session

    def sweep(self, begin: int, budget: int) -> int:
        """Take the content of blocks `begin` … of a retired pool out of the tree; returns the first block not done.

        Stops when `budget` blocks and pruned nodes were visited. What is then left of a long chain whose last leaf went, the
        tree prunes in `prune_condemned`.
        """
        assert self.retired
        tree = self._tree
        for block in range(begin, self._num_known):
            if budget <= 0:
                return block
            budget -= 1
            node = self._node[block]
            if node is not None:
                self._node[block] = None
                if self._duplicates:
                    self._duplicates.pop(node, None)
                if node.copy_in(self):
                    node.drop_copy(self)
                    budget -= tree.prune(node, max(budget, 1))
        return self.num_blocks
