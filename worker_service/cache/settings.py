"""Settings of the cache side."""

from __future__ import annotations

from dataclasses import dataclass

from . import windows
from .running_state import SCRATCH_BLOCKS

MOST_BLOCKS = 1 << 16
"""Blocks of one sequence at most, where no pool bounds it: the manager's limit."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes of the pools, and timing and size of calls."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: tuple[int, ...] = (1024,)
    """Blocks of each group's pool, the null block included."""
    windows: tuple[int, ...] = ()
    """Tokens that the layers of each group see, 0: all. Empty: no group has a window."""
    state_grid: int = 0
    """Tokens at whose multiples states are kept for others, in the last group. 0: there are no recurrent layers."""
    cross_group: int | None = None
    """The group with cross attention, whose blocks hold the KV of encoder inputs; None: there is none."""
    max_chunk_tokens: int = 512
    """Most tokens of one sequence in one step, if a group has a window."""
    retention_interval: int = 0
    """Tokens after which windows and states are kept for others, again and again; 0: only where prompts may part."""
    report_seconds: float = 0.1
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """Seconds of decoding that the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    no_blocks_retry_seconds: float = 1.0
    """Wait after NO_BLOCKS before the next Allocate if nothing is freed; only a safeguard."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""
    max_call_bytes: int = 8 << 20
    """Bytes of tokens and table entries in one call, both directions; half of gRPC's message size."""

    @property
    def full_groups(self) -> tuple[int, ...]:
        """Groups that keep everything of a sequence: those whose layers have neither a window nor a state, nor cross attention."""
        return tuple(
            group for group in range(len(self.num_blocks)) if not self.has_scratch(group) and group != self.cross_group
        )

    @property
    def scratch_groups(self) -> tuple[int, ...]:
        """Groups in which a sequence has scratch blocks: those with a window or a state."""
        return tuple(group for group in range(len(self.num_blocks)) if self.has_scratch(group))

    @property
    def attention_groups(self) -> tuple[int, ...]:
        """Groups of layers that attend to the sequence itself, and so have block tables."""
        return tuple(
            group for group in range(len(self.num_blocks)) if not self.is_state(group) and group != self.cross_group
        )

    @property
    def grid_blocks(self) -> int:
        """Boundaries are multiples of so many blocks."""
        return self.state_grid // self.block_size or 1

    def window(self, group: int) -> int:
        """Tokens that a group's layers see; 0: all, or they do not attend."""
        return self.windows[group] if group < len(self.windows) else 0

    def is_state(self, group: int) -> bool:
        """Whether a group's layers are recurrent."""
        return bool(self.state_grid) and group == len(self.num_blocks) - 1

    def has_scratch(self, group: int) -> bool:
        """Whether sequences have scratch blocks in a group."""
        return bool(self.window(group)) or self.is_state(group)

    def span(self, group: int) -> int:
        """Blocks before a boundary that are kept there in a group with a window or a state."""
        return 1 if self.is_state(group) else windows.span(self.windows[group], self.block_size)

    def scratch_blocks(self, group: int) -> int:
        """Blocks that one sequence is granted in a group with a window or a state."""
        if self.is_state(group):
            return SCRATCH_BLOCKS
        return windows.ring_blocks(self.windows[group], self.max_chunk_tokens, self.block_size, self.grid_blocks)

    def fork_blocks(self, group: int) -> int:
        """Blocks of the reserve that a fork needs at most: its tail, its running state, or a ring; a unit is shared."""
        if group == self.cross_group:
            return 0
        return self.span(group) + self.grid_blocks if self.window(group) else 1

    @property
    def capacity(self) -> int:
        """Blocks of tokens that one sequence can have at most: those of the smallest pool of a group that keeps everything, or of
        another one without room for a whole scratch and what it may hit."""
        bounding = [self.num_blocks[group] - 1 for group in self.full_groups]
        bounding += [
            self.num_blocks[group] - 1
            for group in self.scratch_groups
            if self.num_blocks[group] - 1 < self.scratch_blocks(group) + self.span(group)
        ]
        return min(bounding, default=MOST_BLOCKS)

    def num_unit_blocks(self, num_encoder_tokens: int) -> int:
        """Blocks of the KV of an encoder's input."""
        return -(-num_encoder_tokens // self.block_size)

    @property
    def unit_capacity(self) -> int:
        """Blocks of the longest input of an encoder; 0 without cross attention."""
        return 0 if self.cross_group is None else self.num_blocks[self.cross_group] - 1
