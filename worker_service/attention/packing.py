"""The layout of a step's new tokens in one packed row, and the slots of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from .block_tables import NO_CHANGES, BlockTables, Changes, IntArray
from .layout import Layout, PackedPart
from .shared_prefix import SharedPrefix, find_shared_prefixes
from .staging import Staging

_NUMBERS_PER_PART = 6
"""Numbers copied to the device per decode: row, start, length, slot, and a new block with its index."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The parts of a step, concatenated to one row of ΣT tokens. Built once per step, shared by all layers.

    It is valid until the Packer packs the next step, which has the same buffers.
    """

    block_size: int
    device: torch.device
    layout: Layout
    starts: list[int]
    """Per part: position of its first new token = number of tokens whose KV its blocks hold."""
    on_device: PartTensors
    input_ids: torch.Tensor
    """[1, ΣT] int64."""
    position_ids: torch.Tensor
    """[1, ΣT] int64: position of each token in its own sequence."""
    slot_mapping: torch.Tensor
    """[ΣT] int64: block_id · block_size + offset in the block, where the token's KV is written."""

    @property
    def query_lens(self) -> list[int]:
        """Per part: number of new tokens, at least 1."""
        return self.layout.query_lens

    @property
    def offsets(self) -> list[int]:
        """Per part: index of its first token in the packed row."""
        return self.layout.offsets

    @property
    def tables(self) -> list[list[int]]:
        """Per part: block ids from position 0, cut to the blocks that cover its new tokens."""
        return self.layout.tables

    @property
    def table_arrays(self) -> list[IntArray]:
        """`tables` as arrays."""
        return self.layout.arrays

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])

    @property
    def context_lens(self) -> list[int]:
        """Per part: number of tokens with KV after this step."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    def shared_prefixes(self, min_saved_tokens: int, max_query_len: int) -> list[SharedPrefix]:
        """See find_shared_prefixes; among parts with at most `max_query_len` new tokens. Steps with one layout share the result."""
        known = self.layout.prefixes
        key = (min_saved_tokens, max_query_len)
        if key not in known:
            some = [index for index, length in enumerate(self.query_lens) if length <= max_query_len]
            tables, starts = [self.tables[index] for index in some], [self.starts[index] for index in some]
            found = find_shared_prefixes(tables, starts, self.block_size, min_saved_tokens)
            known[key] = [SharedPrefix([some[part] for part in one.parts], one.num_blocks) for one in found]
        return known[key]

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
        self._layout: Layout | None = None
        """Of the step before, like the following."""
        self._packing: Packing | None = None
        self._tensors: list[torch.Tensor] = []
        """As sent, in the order of `_send`."""
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
        starts = [part.start for part in parts]
        changes = self._keep_layout(parts)
        try:
            if changes is None:
                changes = self._lay_out(parts, starts)
            assert self._layout is not None
            return self._send(self._layout, parts, starts, changes)
        except PackingError:
            raise
        except BaseException:
            self._forget()  # the device may have some of the changes
            raise

    def _keep_layout(self, parts: Sequence[PackedPart]) -> Changes | None:
        """Keep the layout of the step before, if it is one of the same decodes; returns the blocks appended to its tables. None,
        without a change, if the step needs a layout of its own, or is wrong."""
        layout = self._layout
        if layout is None:
            return None
        grown = layout.growth(parts, self._block_size)
        if grown is None or not all(0 < block < self._num_blocks for _, block in grown):
            return None
        if not self.block_tables.has_room(layout.tables[index] for index, _ in grown):
            return None
        return self._append(layout, grown) if grown else NO_CHANGES

    def _append(self, layout: Layout, grown: Sequence[tuple[int, int]]) -> Changes:
        """Append a block to the tables of these parts."""
        places = []
        for index, block in grown:
            table = layout.tables[index] = [*layout.tables[index], block]
            place, layout.arrays[index] = self.block_tables.append(int(layout.rows[index]), table)
            places.append(place)
        return Changes(np.array(places, dtype=np.int64), np.array([block for _, block in grown], dtype=np.int64))

    def _lay_out(self, parts: Sequence[PackedPart], starts: list[int]) -> Changes:
        """Make a layout for the step; returns the entries of the block tables that differ from the step before. Raises
        PackingError."""
        size = self._block_size
        query_lens = [len(part.token_ids) for part in parts]
        sources = [part.block_table for part in parts]
        keys = [id(source) for source in sources]
        tables = [
            source[: -(-(start + length) // size)]
            for source, start, length in zip(sources, starts, query_lens, strict=True)
        ]
        num_known = self.block_tables.num_known(tables, keys)
        for index, (part, table) in enumerate(zip(parts, tables, strict=True)):
            self._check(index, part, table, num_known[index])
        _check_one_writer(tables, starts, size)
        placement = self.block_tables.place(tables, keys, num_known)
        offsets = [end - length for end, length in zip(accumulate(query_lens), query_lens, strict=True)]
        self._layout = Layout(sources, tables, placement.tables, placement.rows, query_lens, offsets)
        return placement.changes

    def _send(self, layout: Layout, parts: Sequence[PackedPart], starts: list[int], changes: Changes) -> Packing:
        """Send the step to the device."""
        num_tokens = layout.offsets[-1] + layout.query_lens[-1]
        ids = np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, num_tokens)
        start_array, lengths = np.array(starts, dtype=np.int64), np.array(layout.query_lens, dtype=np.int64)
        if layout.is_decodes:
            last_blocks = np.array([table[-1] for table in layout.tables], dtype=np.int64)
            places = last_blocks * self._block_size + start_array % self._block_size
        else:
            places = start_array - layout.offsets  # from a token's index in the row to its position
        if len(changes.places):
            changes = self.block_tables.write(changes)
        tensors = self._staging.send([ids, layout.rows, start_array, lengths, places, changes.places, changes.blocks])
        before = self._packing
        if before is not None and before.layout is layout and tensors is self._tensors:
            self._packing = replace(before, starts=starts)  # the same tensors, with the new numbers
            return self._packing
        input_ids, rows, on_device, query_lens, sent, changed, values = self._tensors = tensors
        if len(changed):
            self.block_tables.tensor.view(-1).index_copy_(0, changed, values.to(torch.int32))
        part_tensors = PartTensors(rows, on_device, query_lens, self.block_tables.tensor)
        positions, slots = on_device, sent
        if not layout.is_decodes:
            positions, slots = self._locate(part_tensors, sent, num_tokens)
        self._packing = Packing(
            block_size=self._block_size,
            device=self._device,
            layout=layout,
            starts=starts,
            on_device=part_tensors,
            input_ids=input_ids[None],
            position_ids=positions[None],
            slot_mapping=slots,
        )
        return self._packing

    def _forget(self) -> None:
        self._layout = self._packing = None
        self.block_tables.forget()

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
