"""Windows: a group whose layers see the last tokens only.

Such a group has no dense block table. What a sequence still needs is in its *scratch* blocks, a ring that the worker writes by
itself: to the manager they have no place and no content. *Named* are only the blocks of windows that end at a *boundary* of the
sequence, from where other prompts can go on: they are sealed, and stay hits after the sequence has released them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from ..block_pool import BlockPool
from ..copies import SLOT_MASK
from ..messages import (
    TOKEN_BYTES,
    AllocateItem,
    BlockMissCause,
    GrantedTable,
    GroupSpec,
    Limits,
    ReportedSequence,
    ReservedBlock,
    SequenceUpdate,
    TableEntry,
)
from ..prefix_tree import Node, PrefixTree, RootNode
from ..refusal import Reason, Refusal, bad_field
from ..restored import Case, Restored, refuse
from ..sequence import Sequence
from .group import Problem, SessionGroup, of_slot


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec(GroupSpec):
    """How a worker introduces layers with a window."""

    window_tokens: int
    """Positions that they see, the token's own included."""
    ring_blocks: int
    """Scratch blocks of one sequence. The worker knows how many tokens it computes in one step."""

    def span(self, block_size: int) -> int:
        """Blocks before a boundary that the next token needs, and so a hit."""
        return -(-(self.window_tokens - 1) // block_size)

    def check(self, field: str, specs: tuple[GroupSpec, ...], block_size: int, limits: Limits) -> None:
        most_tokens, most_blocks = limits.max_tokens_per_sequence, limits.max_blocks_per_sequence
        if not 2 <= self.window_tokens <= most_tokens:
            raise bad_field(
                f"{field}.sliding_window.window_tokens", f"needed 2 to {most_tokens}, got {self.window_tokens}"
            )
        least = self.span(block_size) + 1
        if not least <= self.ring_blocks <= most_blocks:
            raise bad_field(
                f"{field}.sliding_window.ring_blocks",
                f"needed {least} to {most_blocks}: a window of {self.window_tokens} and the next token are in up to {least} blocks "
                f"of {block_size}; got {self.ring_blocks}",
            )


class WindowTable:
    """The blocks of one sequence in such a group."""

    __slots__ = ("ends", "entries", "scratch")

    def __init__(self, entries: dict[int, int], scratch: Iterable[int]) -> None:
        self.entries = entries
        """Named blocks by table index. All of them are sealed."""
        self.scratch = dict.fromkeys(scratch)
        """Blocks that the worker writes as it likes, oldest grant first. No other sequence has them."""
        self.ends: set[int] = set()
        """Table indices after the last entry of each window that the sequence has named itself and whose blocks are in
        `entries`."""

    def __repr__(self) -> str:
        return f"<WindowTable {self.entries} scratch={list(self.scratch)}>"

    def __len__(self) -> int:
        """Blocks that it holds."""
        return len(self.entries) + len(self.scratch)


class WindowSessionGroup(SessionGroup):
    """A hit of m nodes needs the copies of the last min(m, span)."""

    is_dependent = True
    miss = BlockMissCause.WINDOW_NOT_KEPT
    kept = "window"
    """What it keeps at a boundary, in words."""
    setting = "--window-blocks"
    """The worker's setting for the blocks of the group."""

    def __init__(self, spec: WindowSpec, pool: BlockPool, block_size: int) -> None:
        super().__init__(spec, pool, block_size)
        self.span = spec.span(block_size)
        """Blocks before a boundary that a hit needs."""
        self.scratch_blocks = spec.ring_blocks
        """Scratch blocks of one sequence."""

    def most_blocks(self, most: int) -> int:
        return most if self.span + self.scratch_blocks <= self.pool.capacity else self.pool.capacity

    # -- Allocate

    def check_item(self, item: AllocateItem, num_blocks: int, worker_id: str) -> None:
        """A sequence must have room for its scratch blocks while a window that it hits is pinned."""
        needed = min(num_blocks, self.span + self.scratch_blocks)
        if needed > self.pool.capacity:
            raise Refusal(
                Reason.NEVER_FITS,
                f"a sequence of {num_blocks} blocks needs {needed} of group {self.slot}, {self.scratch_blocks} as scratch and "
                f"{self.span} in a {self.kept} that it hits; the whole pool of worker {worker_id!r} has {self.pool.capacity}: give "
                f"the group more blocks ({self.setting})",
                field="tokens",
            )

    def longest_hit(self, path: List[Node], most: int) -> int:
        holder, shift = self.pool.holder, self.pool.shift
        num = most
        while num:
            for index in range(num - 1, max(0, num - self.span) - 1, -1):
                if not path[index].blocks_in(holder) >> shift & SLOT_MASK:
                    num = index  # every hit between it and the last one would need this node too
                    break
            else:
                break
        return num

    def hit(self, item: AllocateItem, root: RootNode | None, path: List[Node], num: int) -> list[int]:
        return [self.pool.copy_of(node) for node in path[max(0, num - self.span) : num]]

    def num_wanted(self, item: AllocateItem, num_hits: int, hit: List[int]) -> int:
        num_tokens = len(item.tokens) // TOKEN_BYTES + max(item.max_new_tokens, 1) - 1
        return min(self.scratch_blocks, -(-num_tokens // self.block_size) - num_hits)

    def enter(self, sequence: Sequence, fresh: list[int], num_hits: int) -> None:
        hit = sequence.tables[self.slot]
        entries = dict(enumerate(hit, num_hits - len(hit)))
        sequence.tables[self.slot] = WindowTable(entries, fresh)

    def granted(self, sequence: Sequence) -> GrantedTable:
        table: WindowTable = sequence.tables[self.slot]
        pool = self.pool
        start, end = min(table.entries, default=0), max(table.entries, default=-1) + 1
        blocks = tuple(table.entries.get(index, 0) for index in range(start, end))
        scratch = tuple(ReservedBlock(block, pool.generation(block)) for block in table.scratch)
        return GrantedTable(blocks, pool.generations(blocks), start, scratch)

    # -- Append and Free

    def new_blocks(self, sequence: Sequence, bound: tuple[TableEntry, ...]) -> list[int]:
        return []

    def check(self, sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
        """Refuse what is stated of a block that is not where it must be. What the same update releases may be gone already: an
        earlier call, whose answer was lost, has released it."""
        table: WindowTable = sequence.tables[self.slot]
        pool, num_full = self.pool, num_computed_tokens // self.block_size
        released = {(block, generation) for _, block, generation in of_slot(update.released, self.slot)}
        named: set[int] = set()
        for index, block, generation in of_slot(update.bound, self.slot):
            if index >= num_full:
                raise bad_field(
                    "bound",
                    f"entry {index} of group {self.slot} is named as part of a window, but only {num_full} blocks are computed",
                )
            if pool.generation(block) == generation and table.entries.get(index) == block:
                continue
            if (
                self._is_own(table, block, generation)
                and block not in named
                and (index not in table.entries or (block, generation) in released)
            ):
                named.add(block)
            elif (block, generation) not in released:
                raise self._not_its_own(sequence, f"as entry {index}", block, generation)
        for block, generation in of_slot(update.scratch, self.slot):
            if (not self._is_own(table, block, generation) or block in named) and (block, generation) not in released:
                raise self._not_its_own(sequence, "as a scratch block", block, generation)

    def _is_own(self, table: WindowTable, block: int, generation: int) -> bool:
        is_known = self.pool.generation(block) == generation
        return is_known and (block in table.scratch or self.pool.is_reserved(block, generation))

    def _not_its_own(self, sequence: Sequence, place: str, block: int, generation: int) -> Refusal:
        return Refusal(
            Reason.STALE_GENERATION,
            f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} {place} of group {self.slot}, "
            "but the block is not there, and neither its scratch nor reserved with that generation: the worker's state is not the "
            "manager's; register again",
        )

    def apply(self, tree: PrefixTree, sequence: Sequence, update: SequenceUpdate) -> None:
        table: WindowTable = sequence.tables[self.slot]
        pool = self.pool
        for block, generation in of_slot(update.scratch, self.slot):
            if pool.is_reserved(block, generation):  # the sequence has begun to use it
                pool.bind(block)
                table.scratch[block] = None
        self._name(tree, sequence, table, of_slot(update.bound, self.slot))
        for index, block, generation in of_slot(update.released, self.slot):
            # What the sequence does not have is ignored, unless it is still reserved.
            if pool.generation(block) != generation:
                continue
            if table.entries.get(index) == block:
                self._release_entry(sequence, table, index)
                table.ends.discard(index + 1)
            elif block in table.scratch:
                del table.scratch[block]
                pool.release(block)
            else:
                pool.unreserve(block, generation)

    def _name(self, tree: PrefixTree, sequence: Sequence, table: WindowTable, bound: tuple[TableEntry, ...]) -> None:
        """Give computed blocks their places: from now on they are hits for others, and never change."""
        pool, nodes = self.pool, sequence.nodes
        end = -1
        for index, block, generation in bound:
            if pool.generation(block) != generation or index in table.entries:
                continue
            if pool.is_reserved(block, generation):
                pool.bind(block)
            elif block in table.scratch:
                del table.scratch[block]
            else:
                continue
            table.entries[index] = block
            if index == end and self.span > 1:
                table.ends.discard(end)  # the window goes on
            end = index + 1
            table.ends.add(end)
            pool.seal(block, nodes[index])
            if tree.journal is not None:
                tree.journal.sealed(sequence.key, pool.holder, self.slot, nodes, table.entries, index, index + 1)

    def release(self, sequence: Sequence) -> None:
        """The window at the end is the last to be evicted."""
        table: WindowTable = sequence.tables[self.slot]
        self.pool.release(*table.scratch)
        table.ends.add(max(table.entries, default=-1) + 1)
        for index in sorted(table.entries, reverse=True):
            self._release_entry(sequence, table, index)

    def _release_entry(self, sequence: Sequence, table: WindowTable, index: int) -> None:
        block, nodes = table.entries.pop(index), sequence.nodes
        # Whether a window that it belongs to may be hit again after the sequence has gone on: the sequence has named it, as at the
        # end of its prompt; or prompts part where it ends; or somebody has asked for it. Any other one was hit by the sequence, and
        # lies on the way to later windows, which serve all that it could serve.
        if any(
            last + 1 in table.ends or last + 1 in sequence.kept or nodes[last].is_junction
            for last in range(index, min(index + self.span, len(nodes)))
        ):
            self.pool.release(block)
        else:
            self.pool.release_demoted(block)

    # -- Fork

    def fork(self, parent: Sequence, num_shared: int) -> WindowTable:
        """The fork has scratch of its own only."""
        return WindowTable({}, ())

    # -- Report

    def check_places(self, name: str, reported: ReportedSequence, num_full: int) -> None:
        indexes = [entry.table_index for entry in reported.tables[self.slot]]
        if len(set(indexes)) < len(indexes) or max(indexes, default=-1) >= num_full:
            refuse("sequences", f"{name}: entries of a window are computed blocks, each of another index")

    def restore(
        self, tree: PrefixTree, restored: Restored, sequence: Sequence, reported: ReportedSequence, num_sealed: int
    ) -> None:
        for node in sequence.nodes[:num_sealed]:
            tree.name(node)  # a window of computed blocks that no block of a table holds may still be named
        super().restore(tree, restored, sequence, reported, num_sealed)
        scratch = reported.scratch[self.slot]
        self.pool.restore_held(scratch)
        restored.cases[Case.SCRATCH] += len(scratch)
        entries = {entry.table_index: entry.block for entry in reported.tables[self.slot]}
        sequence.tables[self.slot] = WindowTable(entries, [entry.block for entry in scratch])
        sequence.num_named[self.slot] = 0

    # -- displays

    def blocks(self, sequence: Sequence) -> list[int]:
        table: WindowTable = sequence.tables[self.slot]
        return [*table.scratch, *table.entries.values()]

    def places(self, sequence: Sequence) -> Iterable[tuple[int | None, int]]:
        table: WindowTable = sequence.tables[self.slot]
        return [*table.entries.items(), *((None, block) for block in table.scratch)]

    def block_at(self, sequence: Sequence, index: int) -> int:
        block: int = sequence.tables[self.slot].entries.get(index, 0)
        return block

    def unsealed(self, sequence: Sequence) -> List[int]:
        return list(sequence.tables[self.slot].scratch)

    # -- Check

    def violations(self, sequence: Sequence) -> Iterator[Problem]:
        table: WindowTable = sequence.tables[self.slot]
        pool, nodes = self.pool, sequence.nodes
        for index, block in table.entries.items():
            if index >= sequence.num_sealed or pool.node(block) is not nodes[index]:
                message = f"entry {index} of a window (block {block}) does not hold the sequence's tokens"
                yield "window", message, block
        for block in table.scratch:
            if pool.node(block) is not None or pool.ref_count(block) != 1:
                message = f"scratch block {block} is sealed, or {pool.ref_count(block)} sequences have it"
                yield "scratch", message, block
