"""Which blocks hold the content of a node of the prefix tree: by holder, one in each slot at most."""

from __future__ import annotations

from functools import reduce
from operator import xor
from typing import Protocol


class Pool(Protocol):
    """The blocks of one group of a session; see BlockPool."""

    num_blocks: int

    def node(self, block: int) -> object:
        """The node that a sealed block holds."""

    def empty(self, block: int) -> None:
        """Drop the content of a cached block."""


class Holder:
    """What holds copies of nodes: a session's pools. A copy is a block in a *slot*, the index of its pool."""

    __slots__ = ("dependent_slots", "pools", "retired", "signatures", "whole_slots")

    def __init__(
        self, signatures: tuple[int, ...], whole_slots: tuple[int, ...] = (0,), dependent_slots: tuple[int, ...] = ()
    ) -> None:
        self.signatures = signatures
        """The signature of each slot, by slot; `Copies` combines them."""
        self.whole_slots = whole_slots
        """Those in which a hit needs a copy of each node."""
        self.dependent_slots = dependent_slots
        """Those in which it needs copies of some, which are of no use without the copies in the whole slots."""
        self.pools: tuple[Pool, ...] = ()
        """The pool of each slot. Pools refer to their holder, so this must be emptied when the session's last copy is gone."""
        self.retired = False
        """Set when the session ends: look-ups ignore its copies, and a sweep removes them from the tree."""

    def signature_of(self, blocks: int) -> int:
        """The exclusive or of the signatures of the slots in which there are blocks."""
        if len(self.signatures) == 1:
            return self.signatures[0]
        return reduce(xor, (one for slot, one in enumerate(self.signatures) if block_at(blocks, slot)), 0)

    def is_complete(self, blocks: int) -> bool:
        """Whether there is a block in each whole slot: a look-up can pass the node. Without such slots, in any slot."""
        if len(self.signatures) == 1 or not self.whole_slots:
            return blocks != 0
        return all(block_at(blocks, slot) for slot in self.whole_slots)


# A holder's blocks with the content of one node are one number: SLOT_BITS for each slot, the first one lowest; 0 where there is
# none. There may be millions of nodes, and a tuple would take a hundred bytes.

SLOT_BITS = 24
"""A pool has at most 2^24 blocks (`Limits.max_blocks_per_pool`)."""

SLOT_MASK = (1 << SLOT_BITS) - 1


def block_at(blocks: int, slot: int) -> int:
    """The block in a slot; 0 if there is none."""
    return blocks >> SLOT_BITS * slot & SLOT_MASK


def with_block(blocks: int, slot: int, block: int) -> int:
    """The same with another block in a slot; 0: without one."""
    shift = SLOT_BITS * slot
    return blocks & ~(SLOT_MASK << shift) | block << shift


class Copies(dict[Holder, int]):
    """Blocks by holder, and the exclusive or of the signatures of their slots, which differs for different sets but for a chance of
    2^-60. (A. L. Zobrist, "A New Hashing Method with Application for Game Playing", 1970.)"""

    __slots__ = ("signature",)

    def __init__(self) -> None:
        super().__init__()
        self.signature = 0

    def set(self, holder: Holder, blocks: int) -> None:
        """Make these the blocks of a holder; 0: it has none."""
        before = self.get(holder, 0)
        if before:
            self.signature ^= holder.signature_of(before)
        if blocks:
            self[holder] = blocks
            self.signature ^= holder.signature_of(blocks)
        elif before:
            del self[holder]

    def is_signed(self) -> bool:
        """Whether the signature is that of the slots. A law."""
        return self.signature == reduce(xor, (holder.signature_of(blocks) for holder, blocks in self.items()))
