"""Steps for a worker's runner, with generated block tables."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvpool.worker_service.model.settings import MemorySettings
from kvpool.worker_service.step import SamplingParams, SequencePart, Step

BLOCK_SIZE: Final = 16
MEMORY: Final = MemorySettings(BLOCK_SIZE, num_blocks=2048)
"""Enough KV for each of CASES."""


class StepShape(NamedTuple):
    """The arguments of `step`."""

    num_sequences: int
    num_new: int
    num_before: int
    num_shared: int = 0


CASES: Final = {
    "decode, 1 sequence of 128": StepShape(1, 1, 128),
    "decode, 16 sequences of 560, of which 512 shared": StepShape(16, 1, 560, 512),
    "decode, 16 sequences of 560 of their own": StepShape(16, 1, 560),
    "decode, 8 sequences of 4,144, of which 4,096 shared": StepShape(8, 1, 4_144, 4_096),
    "prefill, 512 tokens": StepShape(1, 512, 0),
    "prefill, 16 sequences of 32 after 512 shared": StepShape(16, 32, 512, 512),
}
"""Steps as in the workloads of bench.serve."""


def step(num_sequences: int, num_new: int, num_before: int, num_shared: int = 0) -> Step:
    """Sequences that compute `num_new` tokens after `num_before`, and sample one greedily. They share the blocks of their first
    `num_shared` tokens, a multiple of BLOCK_SIZE. Block 0 is in no table."""
    shared = list(range(1, 1 + num_shared // BLOCK_SIZE))
    num_own = -(-(num_before + num_new) // BLOCK_SIZE) - len(shared)
    parts = []
    for number in range(num_sequences):
        first = 1 + len(shared) + number * num_own
        tokens = [1_000 + (7 * number + index) % 30_000 for index in range(num_new)]
        parts.append(SequencePart(tokens, num_before, ([*shared, *range(first, first + num_own)],), SamplingParams()))
    return Step(parts)
