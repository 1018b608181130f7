"""What steps of the same decodes have in common, so that it is computed once for many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .block_tables import IntArray
from .shared_prefix import SharedPrefix


class PackedPart(Protocol):
    """The fields of the engine's SequencePart that packing reads."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which sequences a step has, in which order, with which block tables. A step keeps the layout of the step before it if both
    compute one token for each of the same sequences in the same order, and tables differ at most by one more block."""

    sources: list[list[int]]
    """Per part: the block table of its sequence, kept here so that no other list gets its id()."""
    tables: list[list[int]]
    """Per part: block ids from position 0, cut to the blocks that cover its new tokens. Replaced when a table grows."""
    arrays: list[IntArray]
    """`tables` as arrays."""
    rows: IntArray
    """[N]: row of each part's sequence in the block tables."""
    query_lens: list[int]
    """Per part: number of new tokens."""
    offsets: list[int]
    """Per part: index of its first token in the packed row."""
    prefixes: dict[tuple[int, int], list[SharedPrefix]] = field(default_factory=dict)
    """Results of Packing.shared_prefixes. They last as long as the layout: a block at the end of a table is written by its part
    alone."""

    @property
    def is_decodes(self) -> bool:
        """Whether each part has one new token. None has less."""
        return self.offsets[-1] == len(self.offsets) - 1 and self.query_lens[-1] == 1

    def growth(self, parts: Sequence[PackedPart], block_size: int) -> list[tuple[int, int]] | None:
        """If a step of these parts may keep the layout, the tables that grow, and their new blocks. None if it may not, or if two
        parts write the same block."""
        if len(parts) != len(self.sources) or not self.is_decodes:
            return None
        grown: list[tuple[int, int]] = []
        written: set[int] = set()
        for index, part in enumerate(parts):
            source, table = self.sources[index], self.tables[index]
            last = part.start // block_size
            if part.block_table is not source or len(part.token_ids) != 1 or source[: len(table)] != table:
                return None
            if last == len(table) < len(source):
                grown.append((index, source[last]))
            elif last != len(table) - 1:
                return None
            written.add(source[last])
        return grown if len(written) == len(parts) else None
