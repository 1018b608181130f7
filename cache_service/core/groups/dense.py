"""A group of layers that see all of a sequence: its table has a block for each block of the text."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from ..copies import SLOT_MASK
from ..messages import AllocateItem, GroupSpec
from ..prefix_tree import Node, RootNode
from .group import SessionGroup


@dataclass(frozen=True, slots=True)
class DenseSpec(GroupSpec):
    """How a worker introduces such layers."""


class DenseSessionGroup(SessionGroup):
    """A hit of m nodes needs the copies of all of them."""

    is_whole = True

    def hit(self, item: AllocateItem, root: RootNode | None, path: List[Node], num: int) -> list[int]:
        holder = self.pool.holder
        # As `Node.blocks_in`, nearly always without the call.
        found = [node.copy_blocks if node.copy_holder is holder else node.blocks_in(holder) for node in path[:num]]
        if len(holder.signatures) > 1:
            shift = self.pool.shift
            found = [blocks >> shift & SLOT_MASK for blocks in found]
        if 0 in found:
            del found[found.index(0) :]
        return found
