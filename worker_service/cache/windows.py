"""Arithmetic of sliding windows: how many blocks a group of layers needs that see the last `window` tokens only.

Such a group keeps a sequence's last blocks in a *ring*: a block whose tokens have left the window is written again. Named, and so
kept for others, are only the blocks of windows that end at a *boundary* of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


def span(window: int, block_size: int) -> int:
    """Blocks before a block boundary that hold the KV that the next token sees, itself not counted."""
    return -(-(window - 1) // block_size)


def ring_blocks(window: int, chunk_tokens: int, block_size: int) -> int:
    """Blocks that a sequence has at most in a step that computes `chunk_tokens` of its tokens: theirs, which begin anywhere in a
    block, and the span before the first of them."""
    return span(window, block_size) + -(-(chunk_tokens - 1) // block_size) + 1


def largest_chunk(windows: Sequence[int], most: int, *, least: int = 512) -> int:
    """Tokens of a prompt that one step computes at most: about the largest window, so that a ring has about two windows."""
    return min(most, max([least, *windows]))
