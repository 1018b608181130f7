"""A kind of group that the product does not have: layers that see every second block of a text. It shows what a new kind takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.cache_service.core.groups.group import Problem, SessionGroup, of_slot
from kvpool.cache_service.core.messages import TOKEN_BYTES as TOKEN_BYTES
from kvpool.cache_service.core.messages import AllocateItem, BlockMissCause, GroupSpec, ReportedSequence, SequenceUpdate
from kvpool.cache_service.core.prefix_tree import Node, PrefixTree, RootNode
from kvpool.cache_service.core.refusal import Reason, Refusal, bad_field
from kvpool.cache_service.core.restored import Restored, refuse
from kvpool.cache_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class EverySecondSpec(GroupSpec):
    """How a worker introduces it."""


def _half(num_blocks: int) -> int:
    """Blocks of the group for so many of a text."""
    return (num_blocks + 1) // 2


class EverySecondGroup(SessionGroup):
    """Entry i of a table is for block 2i of the text. A hit of m nodes needs the copies of the even ones."""

    is_dependent = True
    miss = BlockMissCause.WINDOW_NOT_KEPT

    def most_blocks(self, most: int) -> int:
        return min(most, 2 * self.pool.capacity)

    def check_item(self, item: AllocateItem, num_blocks: int, worker_id: str) -> None:
        if _half(num_blocks) > self.pool.capacity:
            raise Refusal(Reason.NEVER_FITS, f"the pool of group {self.slot} is too small", field="tokens")

    def longest_hit(self, path: List[Node], most: int) -> int:
        return next((index for index in range(0, most, 2) if not self.pool.copy_of(path[index])), most)

    def hit(self, item: AllocateItem, root: RootNode | None, path: List[Node], num: int) -> list[int]:
        return list(map(self.pool.copy_of, path[:num:2]))

    def num_wanted(self, item: AllocateItem, num_hits: int, hit: List[int]) -> int:
        return _half(-(-len(item.tokens) // (TOKEN_BYTES * self.block_size))) - len(hit)

    def check(self, sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
        new = self.new_blocks(sequence, of_slot(update.bound, self.slot))
        if _half(num_computed_tokens // self.block_size) > len(sequence.tables[self.slot]) + len(new):
            raise bad_field("num_computed_tokens", f"the table of group {self.slot} is too short")

    def apply(self, tree: PrefixTree, sequence: Sequence, update: SequenceUpdate) -> None:
        for index, block in self.places(sequence):
            if index is not None and index < sequence.num_sealed and self.pool.node(block) is None:
                self.pool.seal(block, sequence.nodes[index])

    def fork(self, parent: Sequence, num_shared: int) -> list[int]:
        return list(parent.tables[self.slot][: _half(num_shared)])

    def check_places(self, name: str, reported: ReportedSequence, num_full: int) -> None:
        indexes = [entry.table_index for entry in reported.tables[self.slot]]
        if indexes != list(range(0, min(2 * len(indexes), num_full), 2)):
            refuse("sequences", f"{name}: needed every second computed block of group {self.slot}, from index 0 on")

    def restore(
        self, tree: PrefixTree, restored: Restored, sequence: Sequence, reported: ReportedSequence, num_sealed: int
    ) -> None:
        super().restore(tree, restored, sequence, reported, num_sealed)
        self.pool.restore_held(reported.scratch[self.slot])
        sequence.tables[self.slot] += [one.block for one in reported.scratch[self.slot]]

    def places(self, sequence: Sequence) -> Iterable[tuple[int | None, int]]:
        return [(2 * entry, block) for entry, block in enumerate(self.blocks(sequence))]

    def block_at(self, sequence: Sequence, index: int) -> int:
        return 0 if index % 2 else super().block_at(sequence, index // 2)

    def unsealed(self, sequence: Sequence) -> List[int]:
        return [block for block in self.blocks(sequence) if self.pool.node(block) is None]

    def violations(self, sequence: Sequence) -> Iterator[Problem]:
        for index, block in self.places(sequence):
            assert index is not None
            holds = sequence.nodes[index] if index < sequence.num_sealed else None
            if self.pool.node(block) is not holds:
                yield "sealing", f"entry for block {index} is not sealed as it should be", block
