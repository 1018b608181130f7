"""The blocks of a group with cross attention, which are sealed, cached and evicted unit by unit; see unit.py."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Any

from ..block_pool import CACHED, FREE, BlockPool
from ..messages import ReservedBlock
from ..prefix_tree import Node, RootNode


class UnitPool(BlockPool):
    """A sealed block holds the root whose unit it belongs to. Blocks of one unit always have the same state and ref_count, and lie
    one after the other on the free list."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cached_units: dict[RootNode, None] = {}
        """Roots whose units no sequence has, least recently used first."""

    def cached_units(self) -> list[RootNode]:
        """Roots whose units are cached, least recently used first, as of now."""
        return list(self._cached_units)

    def may_evict(self, root: RootNode) -> bool:
        """Whether the root's unit is one of these."""
        return root in self._cached_units

    def unit(self, root: RootNode) -> tuple[int, ...]:
        """The blocks of a root's unit, in order; empty if there is none."""
        return root.input_blocks.get(self.holder, ())

    def unit_with(self, block: int) -> tuple[int, ...]:
        """The unit that a sealed block is part of."""
        return self.unit(self._root(block))

    def seal_unit(self, blocks: List[int], root: RootNode) -> None:
        """These held blocks now hold the unit of a root that has none here, for good."""
        assert self.holder not in root.input_blocks
        for block in blocks:
            assert self._node[block] is None
            self._node[block] = root
        root.input_blocks[self.holder] = tuple(blocks)

    def pin(self, *blocks: int) -> None:
        """Pin as BlockPool.pin does. `blocks`: one whole unit, or nothing. A private unit has no root; forks share it."""
        super().pin(*blocks)
        for root in map(self._node.__getitem__, blocks[:1]):
            if isinstance(root, RootNode):
                self._cached_units.pop(root, None)

    def release(self, *blocks: int) -> None:
        """Release as BlockPool.release does. `blocks`: all blocks that a sequence has here, in order."""
        super().release(*blocks)
        for block in blocks[:1]:
            if self._state[block] == CACHED:
                self._cached_units[self._root(block)] = None

    def _root(self, block: int) -> RootNode:
        root = self._node[block]
        assert isinstance(root, RootNode)
        return root

    def _serves_hits(self, block: int, node: Node) -> bool:
        return True  # only a root's own unit is sealed

    def _take(self, count: int, generation: int, state: int) -> list[int]:
        while self._num_free - self.num_withheld < count:
            self._evict(next(iter(self._cached_units)))
        return super()._take(count, generation, state)

    def _evict(self, root: RootNode) -> None:
        """Empty a cached unit: all of its blocks are the next to be granted."""
        del self._cached_units[root]
        blocks = root.input_blocks.pop(self.holder)
        for block in reversed(blocks):
            assert self._state[block] == CACHED, "a unit is cached as a whole"
            self._node[block] = None
            self._state[block] = FREE
            self._unlink(block)
            self._push_head(block)
        self._num_cached -= len(blocks)
        self._num_free += len(blocks)
        self.num_evicted += len(blocks)
        if self.changes is not None:
            self.changes.others.update(blocks)
        self._tree.prune(root)

    # -- what a worker reports of an earlier session

    def restore_unit(self, blocks: List[ReservedBlock], root: RootNode) -> None:
        """These free blocks hold the unit of a root that has none here; most recently used for now."""
        for block, generation in blocks:
            self._restore(block, generation)
            self._state[block] = CACHED
            self._push_tail(block)
        self._num_cached += len(blocks)
        self.seal_unit([one.block for one in blocks], root)
        self._cached_units[root] = None

    def touch(self, block: int) -> None:
        """Make a cached unit the most recently used one, when its first block is touched."""
        root = self._root(block)
        blocks = root.input_blocks[self.holder]
        if block == blocks[0]:
            for one in blocks:
                super().touch(one)
            del self._cached_units[root]
            self._cached_units[root] = None

    # -- the end of a session

    def _unseal(self, block: int, node: Node) -> bool:
        assert isinstance(node, RootNode)
        return node.input_blocks.pop(self.holder, None) is not None
