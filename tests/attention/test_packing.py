"""Packing refuses what would read or write outside a sequence's blocks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from kvpool.worker_service.attention.packing import PackingError, pack

CPU = torch.device("cpu")


class Part(NamedTuple):
    token_ids: list[int]
    start: int
    block_table: list[int]


def test_rows_positions_and_slots() -> None:
    packing = pack([Part([11, 12, 13], 3, [5, 2, 9]), Part([21], 0, [1])], block_size=4, num_blocks=10, device=CPU)
    assert packing.input_ids.tolist() == [[11, 12, 13, 21]]
    assert packing.position_ids.tolist() == [[3, 4, 5, 0]]
    assert packing.slot_mapping.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 4]
    assert packing.offsets == [0, 3]
    assert packing.context_lens == [6, 1]
    assert packing.tables == [[5, 2], [1]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part([], 0, [1])], "0 tokens"),
        ([Part([1], -1, [1])], "position -1"),
        ([Part([1] * 5, 0, [1])], "needs 2 blocks of 4 tokens, its table has 1"),
        ([Part([1], 0, [0])], "outside 1 … 9"),
        ([Part([1], 0, [10])], "outside 1 … 9"),
        ([Part([1], 4, [-3, 2])], "outside 1 … 9"),
        ([Part([1], 4, [1, 2]), Part([1], 4, [3, 2])], "same slot"),
    ],
)
def test_refuses(parts: list[Part], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack(parts, block_size=4, num_blocks=10, device=CPU)
