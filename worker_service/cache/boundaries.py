"""Where the windows of a sequence are to be named, and so kept for others, and what that needs."""

from __future__ import annotations

from .sequence import CacheSequence
from .settings import CacheSettings


def reached(sequence: CacheSequence, num_computed_tokens: int, settings: CacheSettings) -> list[int]:
    """The boundaries that the sequence reaches when it has computed so far, in tokens, ascending."""
    found = {boundary for boundary in sequence.boundaries if boundary <= num_computed_tokens}
    step = _interval(settings)
    if step:
        found.update(range((sequence.num_computed_tokens // step + 1) * step, num_computed_tokens + 1, step))
    return sorted(found)


def next_boundary(sequence: CacheSequence, settings: CacheSettings) -> int | None:
    """The first boundary that the sequence has yet to reach, in tokens; None: there is none but its end."""
    step = _interval(settings)
    coming = list(sequence.boundaries[:1])
    if step and (following := (sequence.num_computed_tokens // step + 1) * step) < sequence.max_tokens:
        coming.append(following)
    return min(coming, default=None)


def _interval(settings: CacheSettings) -> int:
    """In tokens, whole blocks."""
    return -(-settings.retention_interval // settings.block_size) * settings.block_size


def _num_needed(sequence: CacheSequence, group: int, boundary: int, settings: CacheSettings) -> int:
    """Placed and free blocks that a sequence can need once its window at a boundary is named: one for each block after it, but no
    more than a ring."""
    ring = sequence.rings[group]
    assert ring is not None
    to_come = max(0, sequence.most_blocks(settings.block_size) - boundary // settings.block_size)
    is_prompt_done = boundary + settings.block_size >= len(sequence.tokens)
    return min(to_come, ring.span + 1 if is_prompt_done else settings.ring_blocks(group))


def num_to_replace(sequence: CacheSequence, group: int, boundary: int, settings: CacheSettings) -> int:
    """Blocks of the reserve that go into the ring when the window at a boundary is named."""
    ring = sequence.rings[group]
    assert ring is not None
    return ring.num_to_replace(boundary // settings.block_size, _num_needed(sequence, group, boundary, settings))
