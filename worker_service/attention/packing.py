"""How the new tokens of a step lie in one packed row, and where their KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class PackedPart(Protocol):
    """What packing needs to know of one sequence's part of a step; the engine's SequencePart has it."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...


class PackingError(ValueError):
    """A part that cannot be packed: it would read or write KV outside its blocks."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The parts of a step one after the other in one row of ΣT tokens. Built once per step, shared by all layers."""

    block_size: int
    device: torch.device
    starts: list[int]
    """Per part: position of its first new token = number of tokens whose KV is in its blocks already."""
    query_lens: list[int]
    """Per part: number of new tokens, at least 1."""
    offsets: list[int]
    """Per part: index of its first token in the packed row."""
    tables: list[list[int]]
    """Per part: block ids from position 0, cut to the blocks that cover its new tokens."""
    table_arrays: list[IntArray]
    """`tables` again, as arrays."""
    input_ids: torch.Tensor
    """[1, ΣT] int64."""
    position_ids: torch.Tensor
    """[1, ΣT] int64: position of each token in its own sequence."""
    slot_mapping: torch.Tensor
    """[ΣT] int64: block_id · block_size + offset in the block, where the token's KV is written."""

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])

    @property
    def context_lens(self) -> list[int]:
        """Per part: tokens whose KV exists once this step's writes are done."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    def slots(self, part: int, first: int, end: int) -> IntArray:
        """Slots of the part's positions first … end − 1, int64 [end − first]."""
        return _slots(self.table_arrays[part], first, end, self.block_size)


def pack(parts: Sequence[PackedPart], block_size: int, num_blocks: int, device: torch.device) -> Packing:
    """Lay out the parts in their order.

    Raises PackingError when a part is empty, when its table is too short, or when it names a block outside
    1 … num_blocks − 1 (block 0 is the null block: nothing may be written there).
    """
    tables: list[list[int]] = []
    arrays: list[IntArray] = []
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    offsets: list[int] = []
    tokens: list[int] = []
    for index, part in enumerate(parts):
        end = part.start + len(part.token_ids)
        table = part.block_table[: -(-end // block_size)]
        array = np.asarray(table, dtype=np.int64)
        _check(index, part, array, block_size, num_blocks)
        tables.append(table)
        arrays.append(array)
        positions.append(np.arange(part.start, end, dtype=np.int64))
        slots.append(_slots(array, part.start, end, block_size))
        offsets.append(len(tokens))
        tokens.extend(part.token_ids)
    slot_mapping = np.concatenate(slots)
    _check_one_writer(slot_mapping)
    return Packing(
        block_size=block_size,
        device=device,
        starts=[part.start for part in parts],
        query_lens=[len(part.token_ids) for part in parts],
        offsets=offsets,
        tables=tables,
        table_arrays=arrays,
        input_ids=torch.tensor([tokens], dtype=torch.int64, device=device),
        position_ids=torch.from_numpy(np.concatenate(positions)[None]).to(device),
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
    )


def _slots(table: IntArray, first: int, end: int, block_size: int) -> IntArray:
    positions = np.arange(first, end, dtype=np.int64)
    blocks, offsets = np.divmod(positions, block_size)
    result: IntArray = table[blocks] * block_size + offsets
    return result


def _check(index: int, part: PackedPart, table: IntArray, block_size: int, num_blocks: int) -> None:
    if not part.token_ids or part.start < 0:
        raise PackingError(f"part {index} has {len(part.token_ids)} tokens from position {part.start}")
    needed = -(-(part.start + len(part.token_ids)) // block_size)
    if len(table) < needed:
        raise PackingError(f"part {index} needs {needed} blocks of {block_size} tokens, its table has {len(table)}")
    if table.min() < 1 or table.max() >= num_blocks:
        raise PackingError(f"part {index} names a block outside 1 … {num_blocks - 1}: {table.tolist()}")


def _check_one_writer(slot_mapping: IntArray) -> None:
    # Two sequences that write one slot would corrupt each other silently; sealed blocks are never written at all.
    if np.unique(slot_mapping).size != slot_mapping.size:
        raise PackingError("two tokens of the step write the same slot: two parts share a block that is not sealed")
