"""States: a group of recurrent layers, which keep one state of a sequence.

A *snapshot* of a state is, for the manager, a window of one block: a hit of m blocks needs the one at index m − 1. Snapshots are
possible at multiples of the worker's *grid* only, so all boundaries of a sequence that has a state are on it. Its scratch blocks
are the running state.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..block_pool import BlockPool
from ..messages import BlockMissCause, GroupSpec, Limits
from ..refusal import bad_field
from .group import SessionGroup
from .window import WindowSessionGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec(GroupSpec):
    """How a worker introduces recurrent layers."""

    grid_tokens: int
    """A block holds the state as it is after a multiple of so many tokens."""
    scratch_blocks: int
    """Blocks of the running state of one sequence."""

    def check(self, field: str, specs: tuple[GroupSpec, ...], block_size: int, limits: Limits) -> None:
        most_tokens, most_blocks = limits.max_tokens_per_sequence, limits.max_blocks_per_sequence
        if not 1 <= self.grid_tokens <= most_tokens or self.grid_tokens % block_size:
            raise bad_field(
                f"{field}.state.grid_tokens",
                f"needed a multiple of the block size, {block_size}, up to {most_tokens}; got {self.grid_tokens}",
            )
        if not 1 <= self.scratch_blocks <= most_blocks:
            raise bad_field(
                f"{field}.state.scratch_blocks",
                f"needed 1 to {most_blocks}: a sequence has a running state; got {self.scratch_blocks}",
            )


class StateSessionGroup(WindowSessionGroup):
    """A hit of m nodes needs the copy of the last one."""

    miss = BlockMissCause.SNAPSHOT_NOT_KEPT
    kept = "snapshot"
    setting = "--state-blocks"

    def __init__(self, spec: StateSpec, pool: BlockPool, block_size: int) -> None:
        SessionGroup.__init__(self, spec, pool, block_size)
        self.span = 1
        self.grid_blocks = spec.grid_tokens // block_size
        self.scratch_blocks = spec.scratch_blocks
