"""Recurrent layers: of a text, the running state, and snapshots of it that are kept for others at boundaries.

A block has the states of all these layers after a number of tokens. A step reads the state from one block and writes it to one or
two others, so a snapshot costs no step of its own:

    reads    the running state; at first that of the hit, a snapshot that others have too, or nothing
    writes   the running state; and, if it ends on the grid, a copy, which is placed as the end of the block of tokens before it

Chunks of a prompt end at its boundaries, which are on the grid; decodes meet every place of it. So at a boundary the copy is there
to be named, and the one at the last place of the grid is named when the text ends. A copy is only useful: a step without a free
block for it makes none, and a hit is lost, not an error. The running state is never named, so it is never shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.v1 import common_pb2

from ..entry import Entry, StateBlocks
from ..ledger import BlockLedger
from ..reserve import SpareBlock
from .group import Forked, GroupGrant, Sizes, Text
from .scratch import Scratch, ScratchGroup

SCRATCH_BLOCKS = 2
"""Blocks granted to a sequence: the running state, and the first copy."""

_GRID_TOKENS = 64
"""Long enough for the parallel scans of recurrent layers, short enough that little of a prefix is computed again."""


def grid_tokens(block_size: int) -> int:
    """The grid, in tokens, of models with recurrent layers: chunks of prompts end, and snapshots are taken, at its multiples,
    whatever else runs. So equal prefixes are computed in equal pieces."""
    return math.lcm(block_size, _GRID_TOKENS)


class RunningState(Scratch):
    """The blocks of one sequence in the group of recurrent layers."""

    is_useful_only = True

    def __init__(self, grid_blocks: int, block_size: int, hits: Iterable[Entry], scratch: Iterable[SpareBlock]) -> None:
        """`hits`: the snapshot from which it goes on, if there is one. `scratch`: one block at least."""
        super().__init__(1, block_size, hits, scratch)
        self._grid_blocks = grid_blocks
        self.running = self.free.pop(0)
        self._begin = (max(self.named, default=-1) + 1) * block_size
        """Number of tokens whose state is in the hit, and not in the running state; −1: the running state had one from the
        beginning."""

    def __repr__(self) -> str:
        return f"<RunningState {self.running.block} named={sorted(self.named)} placed={sorted(self.placed)} free={len(self.free)}>"

    def state_use(self, num_computed_tokens: int, num_slots: int) -> StateBlocks:
        source = self.running.block
        if num_computed_tokens == self._begin:
            source = self.named[self._begin // self._block_size - 1].block if self._begin else 0
        index, rest = divmod(num_slots, self._block_size)
        copy = None if rest else self.placed.get(index - 1)
        return StateBlocks(source, self.running.block, 0 if copy is None else copy.block)

    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        """Release the snapshots that the sequence has gone on from. Place a copy if the step ends on the grid. See GroupTable."""
        for reserved in spare:
            self._add(reserved)
        for index in [index for index in self.named if (index + 1) * self._block_size < num_computed_tokens]:
            self._release_named(index)
        if self._makes_copy(num_computed_tokens, num_slots):
            self.free += self.placed.values()
            self.placed = {}
            if self.free:
                self.placed[num_slots // self._block_size - 1] = self.free.pop()

    def _makes_copy(self, num_computed_tokens: int, num_slots: int) -> bool:
        return num_slots > num_computed_tokens and num_slots % (self._grid_blocks * self._block_size) == 0

    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        """One for the running state; a copy of it that may become a snapshot is only useful. See GroupTable."""
        return 1

    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> Forked:
        fork = RunningState(self._grid_blocks, self._block_size, (), spare)
        for reserved in spare:
            fork._scratch[reserved] = fork._from_reserve[reserved] = None
        source = self.state_use(num_computed_tokens, num_computed_tokens).source
        if source:
            fork._begin = -1  # also after a hit: the snapshot is copied
        return Forked(fork, (), [(source, fork.running.block)] if source else [])

    def num_useful(self, num_computed_tokens: int, num_slots: int) -> int:
        """One for the copy, if the last one was named; see GroupTable."""
        is_wanted = self._makes_copy(num_computed_tokens, num_slots) and not (self.free or self.placed)
        return int(is_wanted)

    def settle(self, num_to_come: int) -> None:
        """Do nothing: decoding makes copies as the prompt did."""

    def num_to_replace(self, boundary: int, num_to_come: int, *, is_prompt_done: bool) -> int:
        """0: the running state is not what is named."""
        return 0

    def num_lacking(self, boundary: int | None, num_to_come: int, *, is_prompt_done: bool) -> int:
        """One for the next copy, if the last one was named and another place of the grid is to come; see GroupTable."""
        is_to_come = boundary is not None or num_to_come >= self._grid_blocks
        return int(is_to_come and not (self.free or self.placed))

    def scratch(self) -> list[SpareBlock]:
        return [self.running, *super().scratch()]


@dataclass(frozen=True)
class StateGroup(ScratchGroup):
    """Recurrent layers, whose states of one sequence are one block."""

    grid: int
    """Snapshots are taken at multiples of so many tokens."""

    table_type = RunningState

    def __str__(self) -> str:
        return "states"

    @property
    def grid_tokens(self) -> int:
        return self.grid

    def introduce(self, spec: common_pb2.KVCacheGroup, sizes: Sizes) -> None:
        spec.state.scratch_blocks = SCRATCH_BLOCKS
        spec.state.grid_tokens = self.grid

    def span(self, sizes: Sizes) -> int:
        return 1

    def scratch_blocks(self, sizes: Sizes) -> int:
        return SCRATCH_BLOCKS

    def fork_blocks(self, sizes: Sizes) -> int:
        """Its running state; see Group."""
        return 1

    def take(self, ledger: BlockLedger, granted: GroupGrant, text: Text, sizes: Sizes) -> RunningState:
        return RunningState(sizes.grid_blocks, sizes.block_size, granted.hits.entries(), granted.empty.spare())
