"""Boundaries: where what a sequence has is named, and so kept for others, in groups that keep nothing else; and what that needs."""

from __future__ import annotations

from .groups.scratch import Scratch
from .sequence import CacheSequence
from .settings import CacheSettings


def reached(sequence: CacheSequence, num_computed_tokens: int, settings: CacheSettings) -> list[int]:
    """The boundaries, in tokens and ascending, that the sequence reaches by computing up to `num_computed_tokens`."""
    positions = {boundary for boundary in sequence.boundaries if boundary <= num_computed_tokens}
    step = _interval(settings)
    if step:
        positions.update(range((sequence.num_computed_tokens // step + 1) * step, num_computed_tokens + 1, step))
    return sorted(positions)


def next_boundary(sequence: CacheSequence, settings: CacheSettings) -> int | None:
    """The first boundary that the sequence has yet to reach, in tokens; None: there is none but its end."""
    step = _interval(settings)
    coming = list(sequence.boundaries[:1])
    if step and (following := (sequence.num_computed_tokens // step + 1) * step) < sequence.max_tokens:
        coming.append(following)
    return min(coming, default=None)


def chunk(sequence: CacheSequence, most: int, settings: CacheSettings) -> int:
    """Tokens of the next chunk of a prompt, `most` at most. With a grid it ends at the next boundary at the latest, and on the
    grid if not at the end of the tokens; 0: no chunk of so few tokens does."""
    start, num_tokens = sequence.num_computed_tokens, len(sequence.tokens)
    end = min(num_tokens, start + most)
    if settings.grid_tokens:
        end = min(end, next_boundary(sequence, settings) or end)
        if end < num_tokens:
            end -= end % settings.grid_tokens
    return max(0, end - start)


def _interval(settings: CacheSettings) -> int:
    """Tokens between two regular boundaries, rounded up to the grid; 0: there are none."""
    step = settings.sizes.grid_blocks * settings.block_size
    return -(-settings.retention_interval // step) * step


def num_to_replace(sequence: CacheSequence, scratch: Scratch, boundary: int, settings: CacheSettings) -> int:
    """Blocks of the reserve that become scratch when what a sequence has in a group at a boundary is named."""
    num_blocks, num_to_come, is_prompt_done = _after(sequence, boundary, settings)
    return scratch.num_to_replace(num_blocks, num_to_come, is_prompt_done=is_prompt_done)


def num_lacking(sequence: CacheSequence, scratch: Scratch, settings: CacheSettings) -> int:
    """Blocks that should be in the reserve of a group, so that what the sequence will have at its next boundary can be named."""
    boundary = next_boundary(sequence, settings)
    reached = sequence.num_computed_tokens if boundary is None else boundary
    num_blocks, num_to_come, is_prompt_done = _after(sequence, reached, settings)
    return scratch.num_lacking(None if boundary is None else num_blocks, num_to_come, is_prompt_done=is_prompt_done)


def _after(sequence: CacheSequence, boundary: int, settings: CacheSettings) -> tuple[int, int, bool]:
    """A boundary in blocks, the blocks of tokens that can follow it, and whether the prompt is computed there."""
    size = settings.block_size
    num_blocks = boundary // size
    return num_blocks, max(0, sequence.most_blocks(size) - num_blocks), boundary + size >= len(sequence.tokens)
