"""Packing refuses what would read or write outside a sequence's blocks."""

from __future__ import annotations

import pytest
import torch

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.packing import one_group, pack
from tests.attention.part import Part

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part([], 0, ([1],))], "0 tokens"),
        ([Part([1], -1, ([1],))], "position -1"),
        ([Part([1] * 5, 0, ([1],))], "needs 2 blocks of 4 tokens, its table has 1"),
        ([Part([1], 0, ([0],))], "outside 1 … 9"),
        ([Part([1], 0, ([10],))], "outside 1 … 9"),
        ([Part([1], 4, ([-3, 2],))], "outside 1 … 9"),
        ([Part([1], 4, ([1, 2],)), Part([1], 4, ([3, 2],))], "same slot"),
    ],
)
def test_refuses(parts: list[Part], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack(parts, block_size=4, groups=one_group(10), device=CPU)
