"""A sequence of a walkthrough's worker, and what the worker reports of it."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from kvpool.cache_service.core.messages import (
    TOKEN_BYTES,
    Blocks,
    Granted,
    GrantedTable,
    GroupSpec,
    Layout,
    ReservedBlock,
    TableEntry,
    Tables,
)

from .layouts import BLOCK_SIZE, CHUNK_TOKENS
from .scratch import Named, Ring, RunningState, Scratch


class Progress(NamedTuple):
    """The fields of a SequenceUpdate after its key."""

    start: int
    tokens: bytes
    num_computed_tokens: int
    bound: Tables
    scratch: Blocks
    released: Tables


class Fork(NamedTuple):
    """A fork that the worker has made."""

    sequence: WorkerSequence
    num_shared_blocks: int
    progress: Progress


class WorkerSequence:
    """A granted sequence."""

    def __init__(self, layout: Layout, tokens: bytes, max_new_tokens: int, granted: Granted) -> None:
        self._tokens = tokens
        self._num_prompt_tokens = len(tokens) // TOKEN_BYTES
        # The KV of the last generated token is never computed.
        self._num_blocks_max = -(-(self._num_prompt_tokens + max_new_tokens - 1) // BLOCK_SIZE)
        self._num_computed = granted.num_cached_tokens
        self._boundaries = list(granted.boundaries)
        self._num_table_blocks = len(granted.tables[0].blocks)
        self._scratch = [
            _scratch(group, table) if group.scratch_blocks else None
            for group, table in zip(layout.groups, granted.tables, strict=True)
        ]
        self._grid = max(group.grid_blocks for group in layout.groups) * BLOCK_SIZE

    @property
    def _num_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    def add_boundary(self, num_tokens: int) -> None:
        """Add a boundary where another prompt parts. It is ignored if the sequence is past it: its content may be overwritten by
        now."""
        if num_tokens >= self._num_computed:
            self._boundaries = sorted({*self._boundaries, num_tokens})

    def advance(self, generated: bytes, up_to: int | None, reserves: list[list[ReservedBlock]]) -> Progress:
        """Compute all tokens so far, or the first `up_to`; then add the `generated` ones, of which the next step computes the last.
        New blocks come out of `reserves`, which are by group."""
        start = self._num_tokens
        self._tokens += generated
        changes = self._compute(self._num_computable if up_to is None else up_to, reserves)
        if self._num_computed >= self._num_prompt_tokens:
            for scratch in self._scratch:
                if scratch is not None:
                    scratch.settle(self._num_to_come(self._num_computed))
        return self._progress(start, generated, self._grow(reserves[0]), changes)

    def fork(self, generated: bytes, reserve: list[ReservedBlock]) -> Fork:
        """Make a sequence that continues from the computed tokens of this one with the `generated` ones. It shares the full blocks;
        the rest was copied, on the device, into a block of the reserve. A story of forks has one group."""
        num_shared = self._num_computed // BLOCK_SIZE
        start = num_shared * BLOCK_SIZE
        child = copy(self)
        child._tokens = self._tokens[: self._num_computed * TOKEN_BYTES] + generated
        child._num_table_blocks = num_shared
        progress = child._progress(start, child._tokens[start * TOKEN_BYTES :], child._grow(reserve), [Named((), ())])
        return Fork(child, num_shared, progress)

    def end(self, reserves: list[list[ReservedBlock]]) -> Progress:
        """End the sequence after computing all tokens that can be. The window or snapshot at the last possible place is named,
        because a conversation continues from there; it needs no replacement."""
        start = self._num_tokens
        changes = self._compute(self._num_computable, reserves)
        step = self._grid or BLOCK_SIZE
        self._name(self._num_computed - self._num_computed % step, 0, reserves, changes)
        return self._progress(start, b"", (), changes)

    @property
    def _num_computable(self) -> int:
        return self._num_tokens - (self._num_tokens > self._num_prompt_tokens)

    def _num_to_come(self, num_tokens: int) -> int:
        """Return the most blocks of tokens that can follow the first `num_tokens`."""
        return max(0, self._num_blocks_max - -(-num_tokens // BLOCK_SIZE))

    def _compute(self, target: int, reserves: list[list[ReservedBlock]]) -> list[Named]:
        """Compute up to `target` step by step; returns the windows and snapshots that are named at boundaries on the way, by
        group."""
        changes = [Named((), ()) for _ in self._scratch]
        while self._num_computed < target:
            begin = self._num_computed
            end = min(begin + CHUNK_TOKENS, target)
            if self._grid:
                end = min(end, (begin // self._grid + 1) * self._grid)
            for scratch in self._scratch:
                if scratch is not None:
                    scratch.advance(begin, end)
            self._num_computed = end
            while self._boundaries and self._boundaries[0] <= end:
                boundary = self._boundaries.pop(0)
                self._name(boundary, self._num_to_come(boundary), reserves, changes)
        return changes

    def _name(self, boundary: int, num_to_come: int, reserves: list[list[ReservedBlock]], changes: list[Named]) -> None:
        is_prompt_done = boundary + BLOCK_SIZE >= self._num_prompt_tokens
        for group, scratch in enumerate(self._scratch):
            if scratch is not None:
                named = scratch.name(boundary, num_to_come, reserves[group], is_prompt_done=is_prompt_done)
                entries, replacements = changes[group]
                changes[group] = Named(entries + named.entries, replacements + named.replacements)

    def _grow(self, reserve: list[ReservedBlock]) -> tuple[TableEntry, ...]:
        """Lengthen the table of the first group until it has room for all tokens."""
        bound = []
        while self._num_table_blocks * BLOCK_SIZE < self._num_tokens:
            bound.append(TableEntry(self._num_table_blocks, *reserve.pop(0)))
            self._num_table_blocks += 1
        return tuple(bound)

    def _progress(self, start: int, tokens: bytes, bound: tuple[TableEntry, ...], changes: list[Named]) -> Progress:
        return Progress(
            start,
            tokens,
            self._num_computed,
            (bound, *(named.entries for named in changes[1:])),
            tuple(named.replacements for named in changes),
            tuple(() if scratch is None else scratch.take_released() for scratch in self._scratch),
        )


def _scratch(group: GroupSpec, table: GrantedTable) -> Scratch:
    hits = {
        index: ReservedBlock(block, generation)
        for index, (block, generation) in enumerate(zip(table.blocks, table.generations, strict=True), table.start)
    }
    return RunningState(group, hits, table.scratch) if group.grid_blocks else Ring(group, hits, table.scratch)
