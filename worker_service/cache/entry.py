"""An entry of a block table, and its form in messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

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


class StateBlocks(NamedTuple):
    """The blocks that hold a sequence's running state. A block has the states of all recurrent layers."""

    source: int
    """Block with the state after the tokens before the part: the running one, or the snapshot of a hit. 0: no tokens are before it,
    and the layers begin with their initial state. It is read before anything is written."""
    running: int
    """Block that gets the state after the part's tokens. It may be the source."""
    snapshot: int = 0
    """Another block that gets this state too; 0: none."""


class Runs(Protocol):
    """A repeated field of block runs."""

    def add(self, **fields: Any) -> common_pb2.BlockRun:
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


def add_spare(runs: Runs, group: int, blocks: Iterable[tuple[int, int]]) -> None:
    """Blocks without places, with their generations, as one run, if there are any."""
    if pairs := list(blocks):
        block_ids, generations = zip(*pairs, strict=True)
        runs.add(group=group, tier=common_pb2.TIER_DEVICE, block_ids=block_ids, generations=generations)
