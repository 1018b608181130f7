"""Sliding windows: of a text, the blocks that the next tokens see, and those that are kept for others at boundaries.

A sequence's blocks are a *ring*: the window itself, and the blocks that are free to be written next. Only the blocks of windows
that end at a *boundary* of the sequence are named, and so kept for others.

A placed block has the KV of a block of tokens, or gets it in the running step. When its tokens have left the window, it is free
again, and a named one is released.

The ring is turned between steps only, so no unfinished step has a block that is written again. It always has the blocks that the
sequence can still need, whatever is named: a window is named only if the reserve can replace its blocks. So decoding never waits
for a group with a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.v1 import common_pb2

from ..entry import Entry
from ..ledger import BlockLedger
from ..reserve import SpareBlock
from .group import Forked, GroupGrant, Sizes, Text
from .scratch import Scratch, ScratchGroup


class Ring(Scratch):
    """The blocks of one sequence in one group with a window."""

    is_attended = True

    def __init__(
        self,
        span: int,
        block_size: int,
        hits: Iterable[Entry],
        scratch: Iterable[SpareBlock],
        *,
        size: int = 0,
        grid_blocks: int = 1,
    ) -> None:
        """`size`: blocks that a prompt needs. `grid_blocks`: the window that ends at the last multiple of so many blocks stays
        whole."""
        super().__init__(span, block_size, hits, scratch)
        self._size = size
        self._grid_blocks = grid_blocks
        last = max(self.named, default=-1)
        self.table = [0] * (last + 1)
        for index, reserved in self.named.items():
            self.table[index] = reserved.block
        self._first = min(self.named, default=last + 1)
        """Index of the first entry that is not 0; the table's length if there is none."""

    def __repr__(self) -> str:
        return f"<Ring named={sorted(self.named)} placed={sorted(self.placed)} free={len(self.free)}>"

    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        """Turn the ring, and place a block for each index up to `num_slots` positions; see GroupTable."""
        for reserved in spare:
            self._add(reserved)
        self._turn(num_computed_tokens)
        for index in range(len(self.table), -(-num_slots // self._block_size)):
            reserved = self.free.pop()
            self.placed[index] = reserved
            self.table.append(reserved.block)

    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        """0 as long as no step is larger than the ring is made for; see GroupTable."""
        first_kept = self._first_kept(num_computed_tokens)
        num_turned = sum(index < first_kept for index in self.placed)
        return max(0, -(-num_slots // self._block_size) - len(self.table) - len(self.free) - num_turned)

    def _first_kept(self, num_computed_tokens: int) -> int:
        # From the block that is being filled, not from the next token: the window that ends where that block begins stays whole
        # until the next one begins, and can be named until then. With a grid, so does the one at the last place of the grid.
        num_full = num_computed_tokens // self._block_size
        return num_full - num_full % self._grid_blocks - self.span

    def _turn(self, num_computed_tokens: int) -> None:
        for index in range(self._first, min(self._first_kept(num_computed_tokens), len(self.table))):
            self.table[index] = 0
            if (placed := self.placed.pop(index, None)) is not None:
                self.free.append(placed)
            elif index in self.named:
                self._release_named(index)
            self._first = index + 1

    def _kept(self, num_computed_tokens: int) -> list[int]:
        """Indexes of the blocks that later tokens see, and of the window at the last place of the grid."""
        begin, end = max(0, self._first_kept(num_computed_tokens)), -(-num_computed_tokens // self._block_size)
        return [index for index in range(begin, end) if self.table[index]]

    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        return self._num_needed(len(self._kept(num_computed_tokens)) + num_to_come, True)

    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> Forked:
        ring = Ring(self.span, self._block_size, (), (), size=self._size, grid_blocks=self._grid_blocks)
        for reserved in spare:
            ring._add(reserved)
        ring.table = [0] * -(-num_computed_tokens // self._block_size)
        copies = []
        for index in self._kept(num_computed_tokens):
            reserved = ring.free.pop()
            ring.placed[index] = reserved
            ring.table[index] = reserved.block
            copies.append((self.table[index], reserved.block))
        ring._first = min(ring.placed, default=len(ring.table))
        return Forked(ring, (), copies)

    def settle(self, num_to_come: int) -> None:
        """Decoding needs the window and the block that is being filled; see GroupTable."""
        surplus = len(self.placed) + len(self.free) - self._num_needed(len(self.placed) + num_to_come, True)
        for _ in range(min(surplus, len(self.free))):
            self._release(Entry(0, *self.free.pop()))

    def _num_needed(self, num_to_come: int, is_prompt_done: bool) -> int:
        """Placed and free blocks that a sequence can need: one for each block of tokens, but no more than a ring."""
        return min(num_to_come, self.span + self._grid_blocks if is_prompt_done else self._size)

    def num_to_replace(self, boundary: int, num_to_come: int, *, is_prompt_done: bool) -> int:
        num_lost = sum(index not in self.named for index in self.window(boundary))
        num_left = len(self.placed) + len(self.free) - num_lost
        return max(0, self._num_needed(num_to_come, is_prompt_done) - num_left)

    def num_lacking(self, boundary: int | None, num_to_come: int, *, is_prompt_done: bool) -> int:
        """The window at the end of the text is not replaced; see GroupTable."""
        return 0 if boundary is None else self.num_to_replace(boundary, num_to_come, is_prompt_done=is_prompt_done)


@dataclass(frozen=True)
class WindowGroup(ScratchGroup):
    """Layers that see the last tokens only."""

    window: int
    """How many, with the token itself."""

    table_type = Ring
    bounds_chunks = True

    def __str__(self) -> str:
        return f"a window of {self.window} tokens"

    def introduce(self, spec: common_pb2.KVCacheGroup, sizes: Sizes) -> None:
        spec.sliding_window.window_tokens = self.window
        spec.sliding_window.ring_blocks = self.scratch_blocks(sizes)

    def span(self, sizes: Sizes) -> int:
        return span(self.window, sizes.block_size)

    def scratch_blocks(self, sizes: Sizes) -> int:
        return ring_blocks(self.window, sizes.max_chunk_tokens, sizes.block_size, sizes.grid_blocks)

    def fork_blocks(self, sizes: Sizes) -> int:
        """A ring for decoding; see Group."""
        return self.span(sizes) + sizes.grid_blocks

    def take(self, ledger: BlockLedger, granted: GroupGrant, text: Text, sizes: Sizes) -> Ring:
        hits, empty = granted.hits.entries(), granted.empty.spare()
        size = self.scratch_blocks(sizes)
        return Ring(self.span(sizes), sizes.block_size, hits, empty, size=size, grid_blocks=sizes.grid_blocks)


def span(window: int, block_size: int) -> int:
    """Blocks before a block boundary that hold the KV that the next token sees, itself not counted."""
    return -(-(window - 1) // block_size)


def ring_blocks(window: int, chunk_tokens: int, block_size: int, grid_blocks: int = 1) -> int:
    """Blocks that a sequence has at most in a step that computes `chunk_tokens` of its tokens: theirs, which begin anywhere in a
    block, and the span before the last multiple of `grid_blocks` blocks."""
    return span(window, block_size) + grid_blocks - 1 + -(-(chunk_tokens - 1) // block_size) + 1


def largest_chunk(windows: List[int], most: int, *, least: int = 512) -> int:
    """Tokens of a prompt that one step computes at most: about the largest window, so that a ring has about two windows."""
    return min(most, max([least, *windows]))
