"""Finds sequences of a step with the same leading blocks, so that these are attended once for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class SharedPrefix(NamedTuple):
    """Parts of a step whose block tables begin with the same blocks."""

    parts: list[int]
    """Indices of the parts, ascending; at least two."""
    num_blocks: int
    """Leading blocks that all of them share and none writes in this step."""

    @property
    def saved_blocks(self) -> int:
        """Block reads saved by attending once."""
        return (len(self.parts) - 1) * self.num_blocks


def find_shared_prefixes(
    tables: Sequence[list[int]], starts: Sequence[int], block_size: int, min_saved_tokens: int
) -> list[SharedPrefix]:
    """Disjoint sets of parts that share leading blocks, each saving at least min_saved_tokens KV reads per layer.

    Only blocks below every member's start count: their KV is complete, so they need no causal mask. If some members share more
    blocks than all do, the cut that saves more is chosen.
    """
    readable = [table[: start // block_size] for table, start in zip(tables, starts, strict=True)]
    # In lexicographic order, tables that share leading blocks are neighbours, at every depth.
    order = sorted(range(len(readable)), key=readable.__getitem__)
    prefixes = [SharedPrefix(sorted(order[run.first : run.end]), run.depth) for run in _best(_runs(readable, order))]
    prefixes = [prefix for prefix in prefixes if prefix.saved_blocks * block_size >= min_saved_tokens]
    return sorted(prefixes, key=lambda prefix: prefix.parts[0])


@dataclass(slots=True)
class _Run:
    """Neighbours first … end − 1 that share exactly `depth` blocks, and the best cut of them."""

    depth: int
    first: int
    end: int = 0
    inner: list[_Run] = field(default_factory=list)
    """Runs within this one, which share more blocks."""
    saved_blocks: int = 0
    """Block reads that the best cut saves."""
    is_whole: bool = True
    """Whether the best cut is the whole run, not the inner runs."""

    def close(self, end: int) -> None:
        """Decide on the cut. The inner runs must be closed."""
        self.end = end
        whole = (end - self.first - 1) * self.depth
        split = sum(run.saved_blocks for run in self.inner)
        self.is_whole, self.saved_blocks = split <= whole, max(split, whole)


def _runs(tables: Sequence[list[int]], order: Sequence[int]) -> list[_Run]:
    """The outermost runs of at least two tables that share blocks, closed. One pass over the neighbours.

    Open runs, each inside the one before it, are in a list and not on the call stack: there may be as many as tables.
    """
    outermost: list[_Run] = []
    is_open: list[_Run] = []
    for end in range(1, len(order) + 1):
        depth = _common_length(tables[order[end - 1]], tables[order[end]]) if end < len(order) else 0
        first = end - 1
        closed: _Run | None = None
        while is_open and is_open[-1].depth > depth:
            inner, closed = closed, is_open.pop()
            if inner is not None:
                closed.inner.append(inner)
            closed.close(end)
            first = closed.first
        if depth and (not is_open or is_open[-1].depth < depth):
            is_open.append(_Run(depth, first))
        if closed is not None:
            (is_open[-1].inner if depth else outermost).append(closed)
    return outermost


def _best(outermost: list[_Run]) -> Iterator[_Run]:
    """The runs of the cut that saves most."""
    waiting = list(outermost)
    while waiting:
        run = waiting.pop()
        if run.is_whole:
            yield run
        else:
            waiting.extend(run.inner)


def _common_length(left: list[int], right: list[int]) -> int:
    """Number of leading blocks that two tables share. Compares slices, which is faster than a loop in Python."""
    length, step = 0, 1
    while left[length : length + step] == right[length : length + step] and length < len(left):
        length += step
        step *= 2
    while step > 1:
        step //= 2
        if left[length : length + step] == right[length : length + step]:
            length += step
    return min(length, len(left), len(right))
