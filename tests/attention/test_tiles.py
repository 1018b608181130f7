"""Tiles: each row meets each key that it may see once, from left to right, in segments that depend on its position alone."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from kvpool.worker_service.attention.layout import BlockGroup
from kvpool.worker_service.attention.packing import Packing, pack
from kvpool.worker_service.attention.tiles import Tile, TileKind, make_tiles
from kvpool.worker_service.step import SequencePart as Part
from tests.attention.scene import BLOCK_SIZE

Met = dict[tuple[int, int], list[tuple[int, int]]]
"""(part, position) → the segments that it meets, cut to what it may see."""
SEEDS = 30
"""Of random steps."""


def random_step(seed: int) -> Packing:
    """Some parts with a common prefix, some without; decodes and chunks."""
    numbers = random.Random(seed)
    free = iter(range(1, 1000))
    common = [next(free) for _ in range(numbers.randrange(20))]
    parts = []
    for _ in range(numbers.randrange(1, 6)):
        shared = common if numbers.random() < 0.6 else []
        start = len(shared) * BLOCK_SIZE + numbers.randrange(40)
        new = 1 if numbers.random() < 0.5 else numbers.randrange(1, 50)
        own = -(-(start + new) // BLOCK_SIZE) - len(shared)
        parts.append(Part([0] * new, start, ([*shared, *(next(free) for _ in range(own))],)))
    return pack(parts, BLOCK_SIZE, [BlockGroup(1000)], torch.device("cpu"))


def meetings(tiles: list[Tile], window: int | None) -> Met:
    met: Met = {}
    for tile in tiles:
        for rows in tile.rows:
            for position in range(rows.first, rows.end):
                first = tile.first if window is None else max(tile.first, position + 1 - window)
                seen = first, min(tile.end, position + 1)
                assert seen[0] < seen[1], "a tile has rows that see something of it only"
                if tile.kind not in (TileKind.DIAGONAL, TileKind.FRONT):
                    assert seen == (tile.first, tile.end), "every row sees every key"
                met.setdefault((rows.part, position), []).append(seen)
    return met


@pytest.mark.parametrize("window", [None, 1, 5, 8, 30])
@pytest.mark.parametrize("partition", [8, 16])
def test_what_a_row_meets_depends_on_its_position_alone(window: int | None, partition: int) -> None:
    for seed in range(SEEDS):
        packing = random_step(seed)
        met = meetings(make_tiles(packing, 0, window, 1, partition), window)
        starts, ends = packing.starts, packing.context_lens
        assert set(met) == {(p, t) for p in range(len(starts)) for t in range(starts[p], ends[p])}, f"seed {seed}"
        for (_, position), segments in met.items():
            first = 0 if window is None else max(0, position + 1 - window)
            bounds = [first, *range((first // partition + 1) * partition, position + 1, partition), position + 1]
            assert segments == list(pairwise(bounds)), f"seed {seed}"


@pytest.mark.parametrize("window", [None, 5, 30])
def test_without_fixed_segments_there_are_two_at_most(window: int | None) -> None:
    for seed in range(SEEDS):
        packing = random_step(seed)
        for (_, position), segments in meetings(make_tiles(packing, 0, window, 1, None), window).items():
            assert len(segments) <= 2, f"seed {seed}"
            assert segments[0][0] == (0 if window is None else max(0, position + 1 - window)), f"seed {seed}"
            assert segments[-1][1] == position + 1, f"seed {seed}"
            assert all(left[1] == right[0] for left, right in pairwise(segments)), f"seed {seed}"


def test_what_is_shared_is_read_once() -> None:
    """Whole segments within the common blocks; what is left of these each reads for itself."""
    parts = [Part([0], 30, ([1, 2, 3, 4, 5, 6, 7, 8],)), Part([0] * 3, 25, ([1, 2, 3, 4, 5, 9, 10],))]
    packing = pack(parts, BLOCK_SIZE, [BlockGroup(16)], torch.device("cpu"))
    shared = [tile for tile in make_tiles(packing, 0, None, 1, 8) if tile.kind == TileKind.SHARED]
    assert [(tile.first, tile.end, tile.num_rows) for tile in shared] == [(0, 8, 4), (8, 16, 4)]
    assert not [tile for tile in make_tiles(packing, 0, None, 17, 8) if tile.kind == TileKind.SHARED]
    free = [tile for tile in make_tiles(packing, 0, None, 17, None) if tile.kind == TileKind.SHARED]
    assert [(tile.first, tile.end) for tile in free] == [(0, 20)]
