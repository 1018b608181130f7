"""What does not change while a worker runs, as labels of its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLabels:
    """What does not change while a worker runs."""

    version: str
    model_name: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    """With the null block."""
    bytes_per_block: int
    prefix_caching: bool
