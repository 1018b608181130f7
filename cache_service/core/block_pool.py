"""The blocks of one worker session, as a struct of arrays, and the free list that is also the prefix cache.

The free list is an intrusive doubly linked list through `_next` and `_previous`; block 0, the null block, is its sentinel. Its
head is granted next. Every operation is O(1) in the number of blocks. A block on the list is *free* (holds nothing) or *cached*
(sealed, still a hit); off the list it is *reserved* (granted, bound to no sequence) or *held* (in ref_count tables).

The pool keeps its own counts and states; it does not know sequences. Callers keep the tree and the pool in step through
`seal`, `take` and `release` alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

from .messages import BlockCounts
from .prefix_tree import Node, PrefixTree


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
        self._tree = tree
        self._state = bytearray(num_blocks)
        self._ref_count = array("I", bytes(4 * num_blocks))
        self._generation = array("Q", bytes(8 * num_blocks))
        self._node: list[Node | None] = [None] * num_blocks
        self._next = array("I", range(1, num_blocks + 1))
        self._previous = array("I", range(num_blocks - 1))
        self._previous.insert(0, num_blocks - 1)
        self._next[num_blocks - 1] = 0
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
        return self._ref_count[block]

    def generation(self, block: int) -> int:
        """Stamp of the call that granted the block last; 0 if none did."""
        return self._generation[block]

    def node(self, block: int) -> Node | None:
        """What a sealed block holds; None if the block is not sealed."""
        return self._node[block]

    def is_cached(self, block: int) -> bool:
        """Whether the block lies on the free list and is still a hit."""
        return self._state[block] == CACHED

    def is_reserved(self, block: int, generation: int) -> bool:
        """Whether the block belongs to the reserve by the grant with that stamp."""
        return 0 < block < self.num_blocks and self._state[block] == RESERVED and self._generation[block] == generation

    def duplicates(self) -> Iterator[tuple[Node, tuple[int, ...]]]:
        """Nodes that more than one block of this pool holds, with the blocks that do not serve hits, oldest first."""
        for node, blocks in self._duplicates.items():
            yield node, tuple(blocks)

    def free_list(self) -> Iterator[int]:
        """Blocks from the next to be granted to the last. The list must not change meanwhile."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    def previous(self, block: int) -> int:
        """The block before `block` on the free list; 0 at its head. Meaningless off the list."""
        return self._previous[block]

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

    def _take(self, generation: int) -> int:
        """Take the head off the list, evicting what it holds. The caller sets the state."""
        block = self._next[0]
        assert block, "taken from an empty free list"
        assert generation > self._generation[block], "generations must grow"
        after = self._next[block]
        self._next[0] = after
        self._previous[after] = 0
        if self._state[block] == CACHED:
            self._num_cached -= 1
            self.num_evicted += 1
            self._forget(block)
        else:
            self._num_free -= 1
        self._generation[block] = generation
        return block

    def take_held(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to a table: ref_count 1. The caller has checked num_available."""
        blocks = []
        for _ in range(count):
            block = self._take(generation)
            self._state[block] = HELD
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def take_reserved(self, count: int, generation: int) -> list[int]:
        """Grant `count` available blocks to the reserve. The caller has checked num_available."""
        blocks = []
        for _ in range(count):
            block = self._take(generation)
            self._state[block] = RESERVED
            blocks.append(block)
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

    # -- the end of a session

    def sweep(self, begin: int, budget: int) -> int:
        """Take the content of blocks `begin` … of a retired pool out of the tree; returns the first block not done.

        Stops when more than `budget` blocks and pruned nodes were visited: the last leaf of a long chain prunes all of it.
        """
        assert self.retired
        tree = self._tree
        for block in range(begin, self.num_blocks):
            if budget <= 0:
                return block
            budget -= 1
            node = self._node[block]
            if node is not None:
                self._node[block] = None
                if node.copy_in(self):
                    node.drop_copy(self)
                    num_nodes = tree.num_nodes
                    tree.prune(node)
                    budget -= num_nodes - tree.num_nodes
        self._duplicates.clear()
        return self.num_blocks
