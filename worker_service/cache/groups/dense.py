"""Full attention: a block for each block of tokens, all of which are kept."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as List

from kvpool.v1 import cache_pb2, common_pb2

from ..ledger import BlockLedger, Content
from ..reserve import SpareBlock
from .group import Forked, Group, GroupGrant, PlainTable, Run, Sizes, Statement, Text


class DenseTable(PlainTable):
    """The blocks of one sequence in one group with full attention."""

    grows = is_attended = True

    def __init__(self, blocks: Iterable[int], generations: Iterable[int], block_size: int, num_acked: int) -> None:
        """`num_acked`: leading entries that the manager knows."""
        super().__init__(blocks, generations)
        self._block_size = block_size
        self._num_acked = num_acked

    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        return max(0, -(-num_slots // self._block_size) - len(self.table))

    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        for block, generation in spare:
            self.table.append(block)
            self.generations.append(generation)

    def block_of(self, index: int) -> int:
        return self.table[index]

    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        """One for the tail, if there is one; see GroupTable."""
        return int(num_computed_tokens % self._block_size > 0)

    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> Forked:
        """Shares the full computed blocks and copies the tail; see GroupTable."""
        num_shared = num_computed_tokens // self._block_size
        shared = self.table[:num_shared]
        table = DenseTable(shared, self.generations[:num_shared], self._block_size, num_shared)
        table.advance(num_computed_tokens, num_computed_tokens, spare)
        return Forked(table, shared, [(self.table[num_shared], reserved.block) for reserved in spare])

    @property
    def from_reserve(self) -> list[SpareBlock]:
        return list(map(SpareBlock, self.table[self._num_acked :], self.generations[self._num_acked :]))

    @property
    def num_unstated(self) -> int:
        return len(self.table) - self._num_acked

    def state(self, copied: Container[int] = ()) -> tuple[Statement, list[int]]:
        return Statement(tuple(self.entries_from(self._num_acked))), []

    def acknowledge(self, stated: Statement) -> None:
        if stated.bound:
            self._num_acked = max(self._num_acked, stated.bound[-1].table_index + 1)

    def acknowledge_all(self) -> list[int]:
        self._num_acked = len(self.table)
        return []


class DenseGroup(Group):
    """Layers that attend to the whole text."""

    table_type = DenseTable

    def introduce(self, spec: common_pb2.KVCacheGroup, sizes: Sizes) -> None:
        spec.full_attention.SetInParent()

    def num_for(self, text: Text, sizes: Sizes) -> int:
        return text.num_blocks(sizes.block_size)

    def fork_blocks(self, sizes: Sizes) -> int:
        """Its tail; see Group."""
        return 1

    def most_blocks(self, sizes: Sizes) -> int:
        return self.num_blocks - 1

    def num_spare(self, sizes: Sizes, spare: int, num_forks: int, num_lacking: int) -> int:
        """Beams fork again before a call is answered; see Group."""
        return spare + self.num_for_forks(sizes, 2 * num_forks)

    def read(self, granted: cache_pb2.Granted, group: int, text: Text, sizes: Sizes) -> GroupGrant:
        run, num_hits = granted.tables[group], granted.num_cached_tokens // sizes.block_size
        blocks, generations = run.block_ids[:], run.generations[:]
        hits = Run(blocks[:num_hits], generations[:num_hits])
        return GroupGrant(hits, Run(blocks[num_hits:], generations[num_hits:], num_hits))

    def accept(self, ledger: BlockLedger, hits: Run, last: Content | None, tokens: bytes, text: Text) -> Content | None:
        return ledger.accept_hits(hits.blocks, hits.generations, tokens, text.root)

    def take(self, ledger: BlockLedger, granted: GroupGrant, text: Text, sizes: Sizes) -> DenseTable:
        (hits, generations, _), empty = granted.hits, granted.empty
        num_entries = len(hits) + len(empty.blocks)
        return DenseTable([*hits, *empty.blocks], [*generations, *empty.generations], sizes.block_size, num_entries)
