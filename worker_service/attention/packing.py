"""The layout of a step's new tokens in one packed row, and the slots of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .block_tables import BlockTables, IntArray

_NUMBERS_PER_PART = 6
"""Numbers copied to the device per decode: row, start, length, shift, and a new block with its index."""


class PackedPart(Protocol):
    """The fields of the engine's SequencePart that packing reads."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_table(self) -> list[int]: ...


class BlankPart(NamedTuple):
    """A PackedPart for trials of attention, which looks at no token id."""

    start: int
    end: int
    block_table: list[int]

    @property
    def token_ids(self) -> list[int]:
        return [0] * (self.end - self.start)


class StepSizes(NamedTuple):
    """Largest sizes of a step."""

    max_num_seqs: int = 1
    max_num_tokens: int = 1
    max_blocks_per_seq: int = 1


class PackingError(ValueError):
    """A part that cannot be packed: it would read or write KV outside its blocks."""


class PartTensors(NamedTuple):
    """The parts of a step on the device, in order."""

    rows: torch.Tensor
    """[N] int64: row of the part's sequence in the block tables."""
    starts: torch.Tensor
    """[N] int64, see Packing."""
    query_lens: torch.Tensor
    """[N] int64, see Packing."""
    block_tables: torch.Tensor
    """[max_num_seqs, max_blocks_per_seq] int32; a row is valid up to the part's last token."""

    def gather_tables(self, width: int) -> torch.Tensor:
        """[N, width] int32: the parts' rows, cut to the first `width` blocks."""
        return self.block_tables[:, :width].index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Packing:
    """The parts of a step, concatenated to one row of ΣT tokens. Built once per step, shared by all layers.

    Its tensors and arrays are in buffers of the Packer: they are valid until it packs the next step.
    """

    block_size: int
    device: torch.device
    starts: list[int]
    """Per part: position of its first new token = number of tokens whose KV its blocks hold."""
    query_lens: list[int]
    """Per part: number of new tokens, at least 1."""
    offsets: list[int]
    """Per part: index of its first token in the packed row."""
    tables: list[list[int]]
    """Per part: block ids from position 0, cut to the blocks that cover its new tokens."""
    table_arrays: list[IntArray]
    """`tables` as arrays."""
    on_device: PartTensors
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
        """Per part: number of tokens with KV after this step."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    def slots(self, part: int, first: int, end: int) -> IntArray:
        """Slots of the part's positions first … end − 1, int64 [end − first]."""
        blocks, offsets = np.divmod(np.arange(first, end, dtype=np.int64), self.block_size)
        result: IntArray = self.table_arrays[part][blocks] * self.block_size + offsets
        return result


class Packer:
    """Packs step after step in the same buffers. The block tables stay on the device between steps."""

    def __init__(self, block_size: int, num_blocks: int, device: torch.device, sizes: StepSizes | None = None) -> None:
        """The buffers are allocated for `sizes`; they grow if a step needs more."""
        sizes = sizes or StepSizes()
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._device = device
        self.block_tables = BlockTables(device, sizes.max_num_seqs, sizes.max_blocks_per_seq)
        self._staging = Staging(device, sizes.max_num_tokens + _NUMBERS_PER_PART * sizes.max_num_seqs)
        self._allocate(sizes.max_num_tokens)

    def _allocate(self, max_num_tokens: int) -> None:
        self._indices = torch.arange(max_num_tokens, device=self._device)
        self._positions = torch.empty_like(self._indices)
        self._slots = torch.empty_like(self._indices)

    def pack(self, parts: Sequence[PackedPart]) -> Packing:
        """Lay out the parts in order.

        Raises PackingError, without a change, if a part is empty, its table is too short, or has a block outside
        1 … num_blocks − 1 (block 0 is the null block, which is never written).
        """
        size = self._block_size
        starts = [part.start for part in parts]
        query_lens = [len(part.token_ids) for part in parts]
        keys = [id(part.block_table) for part in parts]
        tables = [
            part.block_table[: -(-(start + length) // size)]
            for part, start, length in zip(parts, starts, query_lens, strict=True)
        ]
        num_known = self.block_tables.num_known(tables, keys)
        for index, (part, table) in enumerate(zip(parts, tables, strict=True)):
            self._check(index, part, table, num_known[index])
        _check_one_writer(tables, starts, size)
        ends = list(accumulate(query_lens))
        offsets = [end - length for end, length in zip(ends, query_lens, strict=True)]
        try:
            placement = self.block_tables.place(tables, keys, num_known)
            input_ids, rows, on_device, lengths, shifts, changed, values = self._staging.send(
                [
                    np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, ends[-1]),
                    placement.rows,
                    np.array(starts, dtype=np.int64),
                    np.array(query_lens, dtype=np.int64),
                    np.subtract(starts, offsets, dtype=np.int64),
                    placement.changed,
                    placement.values,
                ]
            )
            self.block_tables.tensor.view(-1).index_copy_(0, changed, values.to(torch.int32))
            part_tensors = PartTensors(rows, on_device, lengths, self.block_tables.tensor)
            positions, slots = self._locate(part_tensors, shifts, ends[-1])
        except BaseException:
            self.block_tables.forget()  # the device may have some of the changes
            raise
        return Packing(
            block_size=size,
            device=self._device,
            starts=starts,
            query_lens=query_lens,
            offsets=offsets,
            tables=tables,
            table_arrays=placement.tables,
            on_device=part_tensors,
            input_ids=input_ids[None],
            position_ids=positions[None],
            slot_mapping=slots,
        )

    def _locate(self, parts: PartTensors, shifts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Position and slot of each token, computed on the device. shifts: [N], first position − first index in the row."""
        if num_tokens > self._indices.numel():
            self._allocate(1 << (num_tokens - 1).bit_length())
        positions, slots = self._positions[:num_tokens], self._slots[:num_tokens]
        part = torch.repeat_interleave(parts.query_lens, output_size=num_tokens)
        torch.add(self._indices[:num_tokens], shifts[part], out=positions)
        blocks = parts.block_tables[parts.rows[part], positions // self._block_size]
        torch.add(positions % self._block_size, blocks, alpha=self._block_size, out=slots)
        return positions, slots

    def _check(self, index: int, part: PackedPart, table: list[int], num_known: int) -> None:
        """Raises PackingError. Checks only new entries of the table."""
        num_tokens = len(part.token_ids)
        if not num_tokens or part.start < 0:
            raise PackingError(f"part {index} has {num_tokens} tokens from position {part.start}")
        needed = -(-(part.start + num_tokens) // self._block_size)
        if len(table) < needed:
            raise PackingError(
                f"part {index} needs {needed} blocks of {self._block_size} tokens, its table has {len(table)}"
            )
        new = table[num_known:]
        if new and (min(new) < 1 or max(new) >= self._num_blocks):
            raise PackingError(f"part {index} has a block outside 1 … {self._num_blocks - 1}: {table}")


def pack(parts: Sequence[PackedPart], block_size: int, num_blocks: int, device: torch.device) -> Packing:
    """Lay out one step, in buffers of its own. See Packer.pack."""
    return Packer(block_size, num_blocks, device).pack(parts)


def _check_one_writer(tables: Sequence[list[int]], starts: Sequence[int], block_size: int) -> None:
    # Two sequences that write one block would corrupt each other silently; sealed blocks are never written.
    written = [block for table, start in zip(tables, starts, strict=True) for block in table[start // block_size :]]
    if len(set(written)) != len(written):
        raise PackingError("two tokens of the step write the same slot: two parts share a block that is not sealed")


class Staging:
    """A buffer of int64 numbers, written on the host and read on the device. On a CPU both are the same memory."""

    def __init__(self, device: torch.device, capacity: int = 1) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._array = self._host.numpy()
        self._there = torch.empty(capacity, dtype=torch.int64, device=self._device) if on_gpu else self._host

    def send(self, arrays: Sequence[npt.NDArray[np.int64]]) -> list[torch.Tensor]:
        """The arrays on the device, in order; valid until the next send."""
        lengths = [array.size for array in arrays]
        num_numbers = sum(lengths)
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the buffer
        if num_numbers > self._host.numel():
            self._allocate(1 << (num_numbers - 1).bit_length())
        np.concatenate(arrays, out=self._array[:num_numbers])
        if self._there is not self._host:
            self._there[:num_numbers].copy_(self._host[:num_numbers], non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self._device))
        return list(torch.split(self._there[:num_numbers], lengths))
