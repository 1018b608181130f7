"""What the device must hold after a step was packed."""

from __future__ import annotations

import torch

from kvpool.worker_service.attention.packing import Packing, one_group
from tests.attention.part import Part

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 200
GROUPS = one_group(NUM_BLOCKS)


def check(packing: Packing, parts: list[Part]) -> None:
    """Everything that a step reads of the device, by hand."""
    on_device = packing.on_device
    (tables,), (group,) = zip(*(part.block_tables for part in parts), strict=True), packing.groups
    width = max(map(len, tables))
    gathered = packing.gather_tables(min(width, group.block_tables.shape[1])).tolist()
    slots: list[int] = []
    positions: list[int] = []
    for index, part in enumerate(parts):
        end = part.start + len(part.token_ids)
        table = tables[index][: -(-end // BLOCK_SIZE)]
        assert gathered[index][: len(table)] == table
        assert packing.tables()[index] == table
        assert packing.layout.groups[0].arrays[index].tolist() == table
        assert packing.slots(index, 0, end).tolist() == [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(end)
        ]
        assert (packing.offsets[index], packing.context_lens[index]) == (len(positions), end)
        positions += range(part.start, end)
        slots += packing.slots(index, part.start, end).tolist()
    assert group.slot_mapping.tolist() == slots
    assert packing.position_ids.tolist() == [positions]
    assert packing.input_ids.tolist() == [[token for part in parts for token in part.token_ids]]
    assert on_device.starts.tolist() == [part.start for part in parts]
    assert on_device.query_lens.tolist() == [len(part.token_ids) for part in parts]
