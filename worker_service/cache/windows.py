"""Arithmetic of sliding windows: how many blocks a group needs whose layers see the last `window` tokens only. Also the grid of
recurrent layers.

Such a group keeps a sequence's last blocks in a *ring*: a block whose tokens have left the window is written again. Only the blocks
of windows that end at a *boundary* of the sequence are named, and so kept for others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_GRID_TOKENS = 64
"""Long enough for the parallel scans of recurrent layers, short enough that little of a prefix is computed again."""


def grid_tokens(block_size: int) -> int:
    """The grid, in tokens, of models with recurrent layers: chunks of prompts end, and snapshots are taken, at its multiples,
    whatever else runs. So equal prefixes are computed in equal pieces."""
    return math.lcm(block_size, _GRID_TOKENS)


def span(window: int, block_size: int) -> int:
    """Blocks before a block boundary that hold the KV that the next token sees, itself not counted."""
    return -(-(window - 1) // block_size)


def ring_blocks(window: int, chunk_tokens: int, block_size: int, grid_blocks: int = 1) -> int:
    """Blocks that a sequence has at most in a step that computes `chunk_tokens` of its tokens: theirs, which begin anywhere in a
    block, and the span before the last multiple of `grid_blocks` blocks."""
    return span(window, block_size) + grid_blocks - 1 + -(-(chunk_tokens - 1) // block_size) + 1


def largest_chunk(windows: Sequence[int], most: int, *, least: int = 512) -> int:
    """Tokens of a prompt that one step computes at most: about the largest window, so that a ring has about two windows."""
    return min(most, max([least, *windows]))
