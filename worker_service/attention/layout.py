"""What steps of the same decodes have in common, so that it is computed once for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..step import SequencePart
from .block_tables import IntArray
from .shared_prefix import SharedPrefix


class PackingError(ValueError):
    """A part that cannot be packed: it would read or write KV outside its blocks."""


class BlockGroup(NamedTuple):
    """The blocks of layers that share block tables."""

    num_blocks: int
    """Including block 0, the null block."""
    window: int | None = None
    """Sliding window in tokens of all its layers: what lies before it may be gone. None: everything is kept."""

    def first_block(self, start: int, block_size: int) -> int:
        """Index in its table of the first block that a part from position `start` on may read."""
        return 0 if self.window is None else max(0, start + 1 - self.window) // block_size


@dataclass(frozen=True, slots=True, eq=False)
class GroupLayout:
    """The block tables of a step in one group."""

    group: BlockGroup
    sources: list[list[int]]
    """Per part: the block table of its sequence, kept here so that no other list gets its id()."""
    tables: list[list[int]]
    """Per part: block ids from position 0, cut to the blocks that cover its new tokens. Replaced when a table grows. Entries before
    `firsts` mean nothing."""
    arrays: list[IntArray]
    """`tables` as arrays."""
    rows: IntArray
    """[N]: row of each part's sequence in the block tables."""
    firsts: list[int]
    """Per part: the first entry that it could read when it was laid out. A later step of the layout reads from there or later."""
    prefixes: dict[tuple[int, int], list[SharedPrefix]] = field(default_factory=dict)
    """Results of Packing.shared_prefixes. They last as long as the layout: a block at the end of a table is written by its part
    alone."""

    def growth(
        self, parts: Sequence[SequencePart], index: int, num_groups: int, block_size: int
    ) -> dict[int, int] | None:
        """The parts whose tables of group `index` grow, with their new blocks, if a step of these parts may keep the layout. None:
        it may not, or two parts write the same block."""
        grown: dict[int, int] = {}
        written: set[int] = set()
        window = self.group.window
        for number, (part, source, table) in enumerate(zip(parts, self.sources, self.tables, strict=True)):
            tables, start = part.block_tables, part.start
            if len(tables) != num_groups or tables[index] is not source:
                return None
            if window is None:
                if source[: len(table)] != table:
                    return None
            else:
                # What lies before `first` may change at any time: blocks leave the window, and come back at the end of the table.
                first = self.group.first_block(start, block_size)
                if first < self.firsts[number] or source[first : len(table)] != table[first:]:
                    return None
            last = start // block_size
            if last == len(table) < len(source):
                grown[number] = source[last]
            elif last != len(table) - 1:
                return None
            written.add(source[last])
        return grown if len(written) == len(parts) else None


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """Which sequences a step has, in which order, with which block tables. A step keeps the layout of the step before it if both
    compute one token for each of the same sequences in the same order, and tables differ at most by one more block."""

    groups: tuple[GroupLayout, ...]
    query_lens: list[int]
    """Per part: number of new tokens."""
    offsets: list[int]
    """Per part: index of its first token in the packed row."""

    @property
    def is_decodes(self) -> bool:
        """Whether each part has one new token. None has less."""
        return self.offsets[-1] == len(self.offsets) - 1 and self.query_lens[-1] == 1

    def growth(self, parts: Sequence[SequencePart], block_size: int) -> list[dict[int, int]] | None:
        """What grows in each group, if a step of these parts may keep the layout; None: it may not."""
        if len(parts) != len(self.offsets) or not self.is_decodes or any(len(part.token_ids) != 1 for part in parts):
            return None
        grown: list[dict[int, int]] = []
        for index, group in enumerate(self.groups):
            of_group = group.growth(parts, index, len(self.groups), block_size)
            if of_group is None:
                return None
            grown.append(of_group)
        return grown
