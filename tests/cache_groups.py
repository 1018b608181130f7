"""Groups of a worker's cache side."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.groups.group import Group
from kvpool.worker_service.cache.groups.state import StateGroup
from kvpool.worker_service.cache.groups.unit import UnitGroup
from kvpool.worker_service.cache.groups.window import WindowGroup


def groups_of(
    num_blocks: Sequence[int], windows: Sequence[int] = (), *, grid: int = 0, unit: int | None = None
) -> tuple[Group, ...]:
    """Groups with pools of so many blocks. `windows`: tokens, 0: all; empty: no group has one. `grid`: tokens; the last group has a
    state. `unit`: the group with the KV of encoder inputs, of 4,096 tokens at most."""
    groups: list[Group] = [
        WindowGroup(count, window) if window else DenseGroup(count)
        for count, window in zip(num_blocks, windows or [0] * len(num_blocks), strict=True)
    ]
    if grid:
        groups[-1] = StateGroup(num_blocks[-1], grid)
    if unit is not None:
        groups[unit] = UnitGroup(num_blocks[unit], 4096)
    return tuple(groups)
