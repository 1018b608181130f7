"""Steps for a worker's runner, with generated block tables."""

from __future__ import annotations

from typing import Final

from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import SequencePart, Step

BLOCK_SIZE: Final = 16


def step(num_sequences: int, num_new: int, num_before: int, num_shared: int = 0) -> Step:
    """Sequences that compute `num_new` tokens after `num_before`, and sample one greedily. They share the blocks of their first
    `num_shared` tokens, a multiple of BLOCK_SIZE. Block 0 is in no table."""
    shared = list(range(1, 1 + num_shared // BLOCK_SIZE))
    num_own = -(-(num_before + num_new) // BLOCK_SIZE) - len(shared)
    parts = []
    for number in range(num_sequences):
        first = 1 + len(shared) + number * num_own
        tokens = [1_000 + (7 * number + index) % 30_000 for index in range(num_new)]
        parts.append(SequencePart(tokens, num_before, [*shared, *range(first, first + num_own)], SamplingParams()))
    return Step(parts)
