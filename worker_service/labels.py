"""A worker's constant facts, as labels of its metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLabels:
    """Constant while the worker runs."""

    version: str
    model_name: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    """The null block included."""
    bytes_per_block: int
    prefix_caching: bool
