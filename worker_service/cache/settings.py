"""Settings of the cache side."""

from __future__ import annotations

from dataclasses import dataclass

from . import windows

MOST_BLOCKS = 1 << 16
"""Of one sequence, where no pool bounds it: the manager's limit."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Sizes of the pools, and timing and size of calls."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: tuple[int, ...] = (1024,)
    """Blocks of each group's pool, the null block included."""
    windows: tuple[int, ...] = ()
    """By group: tokens that its layers see, 0: all. Empty: no group has a window."""
    max_chunk_tokens: int = 512
    """With windows: most tokens of one sequence in one step."""
    retention_interval: int = 0
    """With windows: tokens after which a window is kept for others, again and again; 0: only where prompts may part."""
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
        """Groups without a window."""
        return tuple(group for group in range(len(self.num_blocks)) if not self.window(group))

    @property
    def window_groups(self) -> tuple[int, ...]:
        """Groups with one."""
        return tuple(group for group in range(len(self.num_blocks)) if self.window(group))

    def window(self, group: int) -> int:
        """Tokens that a group's layers see; 0: all."""
        return self.windows[group] if self.windows else 0

    def span(self, group: int) -> int:
        """Blocks before a boundary that a group with a window needs there."""
        return windows.span(self.windows[group], self.block_size)

    def ring_blocks(self, group: int) -> int:
        """Blocks that one sequence needs in a group with a window."""
        return windows.ring_blocks(self.windows[group], self.max_chunk_tokens, self.block_size)

    @property
    def capacity(self) -> int:
        """Blocks of tokens that one sequence can have at most: those of the smallest pool of a group without a window, or with one
        and without room for a whole ring and the window that it may hit."""
        bounding = [
            self.num_blocks[group] - 1
            for group in range(len(self.num_blocks))
            if not self.window(group) or self.num_blocks[group] - 1 < self.ring_blocks(group) + self.span(group)
        ]
        return min(bounding, default=MOST_BLOCKS)
