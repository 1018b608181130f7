"""The laws of one pool's blocks: conservation, references, free list, state, null block, generation, sealing, fork."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from ..block_pool import CACHED, FREE, HELD, RESERVED, State
from ..groups.group import SessionGroup
from ..session import Session
from .findings import Audit, Course

_LISTED = bytes(int(state in (FREE, CACHED)) for state in range(256))
"""Translates states into whether blocks in them are on the free list."""


class PoolLaws:
    """Checks the pool of one group of a session."""

    def __init__(
        self, session: Session, group: SessionGroup, last_generation: Callable[[], int], findings: Audit
    ) -> None:
        self._session = session
        self._group = group
        self._pool = group.pool
        self._last_generation = last_generation
        self._findings = findings

    def course(self) -> Course:
        """All of them."""
        yield from self._counts_and_references()
        yield from self._free_list()
        yield from self._blocks()
        yield from self._duplicates()
        for problem in self._group.violations_of_listed():
            if problem is not None:
                self._add(*problem)
            yield 1
        self._null_block()

    def _add(self, law: str, message: str, block: int = -1) -> None:
        self._findings.add(law, message, self._session, block, group=self._group.slot)

    def _snapshot_cost(self) -> int:
        """Return what it costs to copy some five bytes per block and to note each sequence, in the units of `Course`."""
        return self._pool.num_known // 128 + len(self._session.sequences) // 2

    def _counts_and_references(self) -> Course:
        """On a snapshot of states, ref_counts and tables: a table's list only grows at its end while its sequence lives, and
        is left as it is when that ends, so the list and its length are all there is to remember. What a sequence has in a window
        is copied: it is little. Blocks without a record were never granted: they are free, and in no table."""
        pool, portion = self._pool, self._findings.portion
        counts = pool.counts()
        states, ref_counts = pool.snapshot_states(), pool.snapshot_ref_counts()
        num_known = len(states)
        lists = [self._group.blocks(sequence) for sequence in self._session.sequences.values()]
        tables = [(table, len(table)) for table in lists]
        yield 2 * self._snapshot_cost()

        found = [0] * len(State)
        num_shared = 0
        found[FREE] = pool.num_blocks - num_known
        for begin in range(1, num_known, portion):
            piece = states[begin : begin + portion]
            for state in range(len(found)):
                found[state] += piece.count(state)
            num_shared += sum(map((1).__lt__, ref_counts[begin : begin + portion]))
            yield portion // 4
        kept = {
            FREE: counts.free + counts.withheld,
            CACHED: counts.cached,
            HELD: counts.held,
            RESERVED: counts.reserved,
        }
        for state, count in kept.items():
            if found[state] != count:
                name = State(state).name.lower()
                self._add("conservation", f"{found[state]} blocks are {name}, the pool counts {count}")
        if num_shared != counts.shared:
            self._add("conservation", f"{num_shared} blocks are shared, the pool counts {counts.shared}")

        num_entries = array("I", [0]) * num_known
        yield self._snapshot_cost()
        for table, length in tables:
            for begin in range(0, length, portion):
                piece_end = min(begin + portion, length)
                for block in table[begin:piece_end]:
                    if 0 <= block < num_known:
                        num_entries[block] += 1
                    elif num_known <= block < pool.num_blocks:
                        self._add("references", f"block {block} is named by a table and was never granted", block)
                yield (piece_end - begin) // 4
            yield 1
        for begin in range(1, num_known, portion):
            end = begin + portion
            if ref_counts[begin:end] != num_entries[begin:end]:
                for block in range(begin, min(end, num_known)):
                    if ref_counts[block] != num_entries[block]:
                        self._add(
                            "references",
                            f"block {block} has ref_count {ref_counts[block]}, {num_entries[block]} table entries name it",
                            block,
                        )
                yield portion // 4
            yield portion // 64

    def _free_list(self) -> Course:
        """The list itself on a snapshot of its links and the states; the way back block by block in `_blocks`."""
        pool, portion = self._pool, self._findings.portion
        follows, states = pool.snapshot_list(), pool.snapshot_states()
        num_known, last_granted = len(states), pool.last_granted
        yield 2 * self._snapshot_cost()
        if num_known < pool.num_blocks and last_granted >= num_known - 1:
            self._add("free list", f"no block of the list represents those from {num_known} on", last_granted)
        listed = bytearray(num_known)
        listed[0] = 1
        block, count = follows[0], 0
        while block:
            if block >= num_known or listed[block]:
                self._add("free list", f"the list runs into block {block} twice or outside the pool", block)
                return
            listed[block] = 1
            block = follows[block]
            count += 1
            if count % portion == 0:
                yield portion // 2
        for begin in range(0, num_known, portion):
            end = begin + portion
            if listed[begin:end] != states[begin:end].translate(_LISTED):
                for block in range(max(begin, 1), min(end, num_known)):
                    if listed[block] != _LISTED[states[block]]:
                        where = "on" if listed[block] else "not on"
                        name = State(states[block]).name.lower()
                        self._add("free list", f"block {block} is {name} and {where} the list", block)
                yield portion // 4
            yield portion // 64

    def _blocks(self) -> Course:
        """What can be said of one block at a time, on the blocks as they are."""
        pool, portion = self._pool, self._findings.portion
        begin = 1
        while begin < pool.num_known:  # which may grow meanwhile
            end = min(begin + portion, pool.num_known)
            last_generation = self._last_generation()
            for block, state, ref_count, generation, node in pool.rows(begin, end):
                if (state == HELD) != (ref_count > 0):
                    name = State(state).name.lower()
                    self._add("state", f"block {block} is {name} with ref_count {ref_count}", block)
                if generation > last_generation or (generation == 0 and state != FREE):
                    self._add(
                        "generation",
                        f"block {block} is {State(state).name.lower()} with generation {generation}; the last given is "
                        f"{last_generation}",
                        block,
                    )
                if block > pool.last_granted and (state != FREE or generation):
                    self._add("budget", f"block {block} was granted; up to {pool.last_granted} they are counted", block)
                if _LISTED[state] and not pool.is_linked_back(block):
                    self._add("free list", f"block {block} does not point back at the block that it follows", block)
                if node is not None or state == CACHED or ref_count >= 2:
                    for problem in self._group.violations_at(block, state, ref_count, node):
                        self._add(*problem)
            yield 2 * (end - begin)
            begin = end
        if not pool.is_linked_back(0):
            self._add("free list", "the end of the list is not where the list says", 0)

    def _duplicates(self) -> Course:
        pool = self._pool
        yield self._snapshot_cost()
        for node in pool.duplicated():
            blocks = pool.duplicates_of(node)
            for block in blocks:
                if pool.node(block) is not node or pool.state(block) is not State.HELD:
                    self._add("sealing", f"block {block} is listed as a duplicate and is none", block)
            yield 1 + 2 * len(blocks)

    def _null_block(self) -> None:
        pool = self._pool
        if pool.state(0) is not State.FREE or pool.ref_count(0) or pool.node(0) is not None:
            self._add("null block", "block 0 was granted, named or sealed", 0)
