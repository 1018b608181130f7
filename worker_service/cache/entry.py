"""An entry of a block table, and its form in messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvpool.v1 import common_pb2


class Entry(NamedTuple):
    """A block at a table index."""

    table_index: int
    """0 for a scratch block, which has none."""
    block: int
    generation: int


class BlockCopy(NamedTuple):
    """A block of a fork's parent that the fork gets a copy of, because the parent goes on writing to it."""

    group: int
    source: int
    target: int


class Runs(Protocol):
    """A repeated field of block runs."""

    def add(self, *, group: int, tier: common_pb2.Tier, start_index: int) -> common_pb2.BlockRun:
        """Append a run."""


def add_entries(runs: Runs, group: int, entries: Iterable[Entry]) -> None:
    """Entries of one table as runs: one for each stretch of consecutive indexes."""
    run, expected = None, 0
    for index, block, generation in sorted(entries):
        if run is None or index != expected:
            run = runs.add(group=group, tier=common_pb2.TIER_DEVICE, start_index=index)
        run.block_ids.append(block)
        run.generations.append(generation)
        expected = index + 1
