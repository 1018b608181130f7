"""A group of a session: the layers whose KV is in the same blocks, and what a call does there.

There is one subclass for each kind of group; a call asks each group for its part and knows no kind. What a group is asked, call by
call:

    Register    most_blocks, longest_input; before, its introduction is checked by `GroupSpec.check`
    Allocate    check_item; longest_hit: how much of a path need not be computed; hit: what is pinned; in_flight: whom to wait for;
                num_wanted: what is to be granted; enter: the sequence has it; granted: the table for the answer
    Append      new_blocks, check: refuse what is wrong; apply
    Fork        fork
    Free        release; leave, if only the sequence goes
    Report      check_places, check_reported, restore
    displays    blocks and what follows there
    Check       violations

A group that is *whole* has a table with a block for each block of the text, so a hit needs a copy of every node there: a look-up
can pass a node if these have it. One that is *dependent* needs copies of some nodes, and they are of no use without the copies in
the whole groups. A group that is neither *holds* no *nodes*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from typing import Any, ClassVar, TypeVar

from ..block_pool import CACHED, FREE, RESERVED, BlockPool, State
from ..messages import (
    AllocateItem,
    BlockMissCause,
    GrantedTable,
    GroupSpec,
    ReportedSequence,
    ReportedUnit,
    ReservedBlock,
    SequenceUpdate,
    TableEntry,
    Wait,
)
from ..prefix_tree import Node, PrefixTree, RootNode
from ..refusal import Reason, Refusal
from ..restored import Case, Restored, refuse
from ..sequence import Sequence

_Entry = TypeVar("_Entry")

Problem = tuple[str, str, int]
"""A law that does not hold in a group, a message, and the block; −1: of no one block."""


def of_slot(groups: tuple[tuple[_Entry, ...], ...], slot: int) -> tuple[_Entry, ...]:
    """What is stated of a group, where groups at the end may be left out."""
    return groups[slot] if slot < len(groups) else ()


class SessionGroup:
    """One group of a session, and its pool. See the top of this file. What is the same for most kinds is here: a table is a list
    of blocks."""

    is_whole: ClassVar[bool] = False
    is_dependent: ClassVar[bool] = False
    holds_nodes: ClassVar[bool] = True
    pool_type: ClassVar[type[BlockPool]] = BlockPool

    grid_blocks = 1
    """What it keeps for others it keeps after multiples of so many blocks."""
    miss: BlockMissCause | None = None
    """The cause that Explain gives if a dependent group lacks what a hit needs; None: it is not dependent."""
    longest_input = 0
    """Tokens of the longest encoder's input that can be served."""

    def __init__(self, spec: GroupSpec, pool: BlockPool, block_size: int) -> None:
        self.spec = spec
        self.pool = pool
        self.slot = pool.slot
        """Its number."""
        self.block_size = block_size

    def most_blocks(self, most: int) -> int:
        """The longest text that the group has room for, in blocks, if the whole groups have room for `most`."""
        return most

    # -- Allocate

    def check_item(self, item: AllocateItem, num_blocks: int, worker_id: str) -> None:
        """Raise Refusal (BAD_FIELD, NEVER_FITS) if a sequence can never be served. `num_blocks`: of its longest text; `worker_id`:
        for the message."""

    def check_length(self, item: AllocateItem, num_blocks: int) -> None:
        """Raise Refusal (BAD_FIELD) if what the item needs is known with another number of blocks."""

    def longest_hit(self, path: List[Node], most: int) -> int:
        """Return the longest hit, in blocks, among the first `most` nodes of a path. Dependent groups only."""
        raise NotImplementedError

    def hit(self, item: AllocateItem, root: RootNode | None, path: List[Node], num: int) -> list[int]:
        """The blocks that a hit of the first `num` nodes has here; of a whole group up to the first that is missing. Raises
        Refusal: BAD_FIELD."""
        raise NotImplementedError

    def in_flight(self, item: AllocateItem, root: RootNode | None, hit: List[int]) -> Wait | None:
        """The sequence that computes what the item needs, apart from the nodes of its path."""
        return None

    def num_wanted(self, item: AllocateItem, num_hits: int, hit: List[int]) -> int:
        """Return how many blocks to grant to the sequence. Partial groups only: a whole one grants what is left of the text."""
        raise NotImplementedError

    def enter(self, sequence: Sequence, fresh: list[int], num_hits: int) -> None:
        """The sequence, whose table is the hit, has been granted these blocks."""
        sequence.tables[self.slot] += fresh

    def granted(self, sequence: Sequence) -> GrantedTable:
        """Its present table."""
        table = sequence.tables[self.slot]
        return GrantedTable(tuple(table), self.pool.generations(table))

    # -- Append and Free

    def new_blocks(self, sequence: Sequence, bound: tuple[TableEntry, ...]) -> list[int]:
        """The blocks that an update adds to a table; each block named must be that entry already, or be reserved here. Raises
        Refusal: STALE_GENERATION."""
        pool, table = self.pool, sequence.tables[self.slot]
        blocks: dict[int, None] = {}
        for index, block, generation in bound:
            if index < len(table):
                if table[index] == block and pool.generation(block) == generation:
                    continue
                found = f"entry {index} is block {table[index]} of generation {pool.generation(table[index])}"
            elif index == len(table) + len(blocks) and pool.is_reserved(block, generation) and block not in blocks:
                blocks[block] = None
                continue
            else:
                found = f"the table has {len(table) + len(blocks)} entries and the block is not reserved with that generation"
            raise Refusal(
                Reason.STALE_GENERATION,
                f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} as entry {index} of group "
                f"{self.slot}, but {found}: the worker's state is not the manager's; register again",
            )
        return list(blocks)

    def check(self, sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
        """Refuse what an update states of a partial group. `num_computed_tokens`: the count after the update. Raises Refusal:
        BAD_FIELD, STALE_GENERATION."""

    def apply(self, tree: PrefixTree, sequence: Sequence, update: SequenceUpdate) -> None:
        """Apply a checked update whose computed blocks have their nodes. Partial groups only."""

    def release(self, sequence: Sequence) -> None:
        """The sequence ends."""
        self.pool.release(*reversed(sequence.tables[self.slot]))

    def leave(self, sequence: Sequence) -> None:
        """It leaves the tree. Its blocks stay as they are."""

    # -- Fork

    def fork(self, parent: Sequence, num_shared: int) -> Any:
        """The table of a fork as it was made; it shares the blocks there. Changes nothing. Raises Refusal: GAP."""
        return parent.tables[self.slot][:num_shared]

    # -- Report

    def check_places(self, name: str, reported: ReportedSequence, num_full: int) -> None:
        """Refuse table indexes and scratch that no sequence, called `name`, with `num_full` computed blocks has. Raises Refusal:
        BAD_REPORT."""
        table = reported.tables[self.slot]
        if [entry.table_index for entry in table] != list(range(len(table))):
            refuse("sequences", f"{name}: its tables must come whole, from index 0 on")
        if reported.scratch[self.slot]:
            refuse("sequences", f"{name}: group {self.slot} has no window, so its sequences have no scratch")

    def check_reported(
        self, restored: Restored, reported: ReportedSequence, root: RootNode, path: List[Node], num_sealed: int
    ) -> None:
        """Refuse a table that contradicts what the report states of its blocks; `num_sealed` nodes of `path` are computed. Changes
        nothing. Raises Refusal: BAD_REPORT."""
        table, name = reported.tables[self.slot], reported.key.sequence_id
        seen: set[int] = set()
        blocks = restored.blocks
        for index, block, generation in table:
            complete = blocks.get(block) if blocks else None
            if block in seen:
                refuse("sequences", f"block {block} is twice in the table of {name!r}")
            seen.add(block)
            if complete is None:
                restored.require_free(block, generation)
                continue
            if index >= num_sealed:
                refuse("sequences", f"block {block} is complete, but a table that names it has not computed it yet")
            if complete != (path[index] if index < len(path) else None, generation):
                refuse(
                    "sequences", f"block {block} of generation {generation:#x} holds something else than a table says"
                )
        for block, generation in reported.scratch[self.slot]:
            if block in seen:
                refuse("sequences", f"block {block} is twice in what {name!r} has")
            seen.add(block)
            restored.require_free(block, generation)

    def restore(
        self, tree: PrefixTree, restored: Restored, sequence: Sequence, reported: ReportedSequence, num_sealed: int
    ) -> None:
        """Take in a checked table of a sequence whose first `num_sealed` nodes are computed."""
        pool, table, path = self.pool, reported.tables[self.slot], sequence.nodes
        new = [entry for entry in table if pool.is_free(entry.block)]
        for _, block, _ in table if len(new) < len(table) else ():
            if not pool.is_free(block):
                restored.cases[Case.HELD_SEALED if pool.is_cached(block) else Case.SHARED] += 1
                pool.pin(block)
        pool.restore_held([ReservedBlock(block, generation) for _, block, generation in new])
        blocks, num_before = restored.blocks, len(restored.blocks)
        for index, block, generation in new:
            if index < num_sealed:
                # Another block serves the hits of this content, or only the table states what the block holds.
                node = path[index]
                if node.block_hash is None:
                    tree.name(node)
                pool.seal(block, node)
                blocks[block] = node, generation
        num_complete = len(blocks) - num_before
        restored.cases[Case.HELD_SEALED] += num_complete
        restored.cases[Case.HELD_FILLING] += len(new) - num_complete
        sequence.tables[self.slot] = [entry.block for entry in table]
        sequence.num_named[self.slot] = len(table)

    def restore_unit(self, tree: PrefixTree, restored: Restored, unit: ReportedUnit, is_live: bool) -> None:
        """Take in the KV of an encoder's input. `is_live`: the worker is served already. Raises Refusal: BAD_REPORT."""
        refuse("units", f"group {self.slot} has no cross attention")

    # -- displays

    def blocks(self, sequence: Sequence) -> list[int]:
        """All that the sequence has, in no particular order."""
        table: list[int] = sequence.tables[self.slot]
        return table

    def places(self, sequence: Sequence) -> Iterable[tuple[int | None, int]]:
        """The same with table indexes; None: none."""
        return enumerate(self.blocks(sequence))

    def block_at(self, sequence: Sequence, index: int) -> int:
        """The block at a table index; 0 if it has none there."""
        table = self.blocks(sequence)
        return table[index] if index < len(table) else 0

    def unsealed(self, sequence: Sequence) -> List[int]:
        """Its blocks that are not sealed, in no particular order."""
        return self.blocks(sequence)[sequence.num_sealed :]

    def token_count(self, sequence: Sequence, index: int) -> int:
        """Slots of the block at a table index whose KV is known to be computed."""
        return max(0, min(self.block_size, sequence.num_computed_tokens - index * self.block_size))

    def table_index(self, block: int, node: Node) -> int:
        """Return the table index of a sealed block, which holds `node`."""
        return node.depth

    def prefix(self, block: int, node: Node) -> list[int]:
        """The blocks from table index 0 on to a sealed one; 0 where none holds that part any more."""
        blocks, at = [block], node.parent
        while at is not None and at.depth >= 0:
            blocks.append(self.pool.copy_of(at))
            at = at.parent
        return blocks[::-1]

    # -- Check

    def violations(self, sequence: Sequence) -> Iterator[Problem]:
        """Yield what is wrong with the table of a live sequence. Partial groups only."""
        yield from ()

    def violations_at(self, block: int, state: int, ref_count: int, node: Node | None) -> Iterator[Problem]:
        """What is wrong with a block, by what it holds."""
        pool = self.pool
        if node is None:
            if state == CACHED:
                yield "state", f"block {block} is cached and serves no hits", block
            elif ref_count >= 2:
                yield "fork", f"block {block} is shared by {ref_count} tables and not sealed", block
            return
        copy = pool.copy_of(node)
        if state in (FREE, RESERVED):
            yield "state", f"block {block} is {State(state).name.lower()} and still sealed", block
        elif state == CACHED and copy != block:
            yield "state", f"block {block} is cached and serves no hits", block
        if node.block_hash is None:
            yield "sealing", f"block {block} is sealed and has no hash", block
        if node.parent is None:
            yield "tree", f"block {block} holds a node that was dropped from the tree", block
        if not copy:
            yield "sealing", f"block {block} is sealed, its node knows no copy in this pool", block
        elif copy != block and not pool.is_duplicate(block, node):
            yield "sealing", f"block {block} is sealed, its node knows only block {copy}", block

    def violations_of_input(self, root: RootNode) -> Iterator[Problem]:
        """What is wrong with the KV of its input that a root says to be here."""
        yield from ()

    def violations_of_listed(self) -> Iterator[Problem | None]:
        """What is wrong with what is listed for eviction beyond blocks, one by one; None: nothing."""
        yield from ()
