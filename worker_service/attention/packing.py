"""The layout of a step's new tokens in one packed row, and the slots of their KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from ..step import SequencePart
from .block_tables import NO_CHANGES, BlockTables, Changes, IntArray
from .encoder_tables import EncoderTables
from .layout import BlockGroup, GroupLayout, KVLayout, PackingError
from .shared_prefix import SharedPrefix, find_shared_prefixes


class Staging:
    """A buffer of int64 numbers for one step, written on the host and read on the device. On a CPU both are the same memory."""

    def __init__(self, device: torch.device, capacity: int = 1) -> None:
        self._device = device
        self._copied: torch.cuda.Event | None = None
        self._lengths: list[int] = []
        """Lengths of the arrays sent last."""
        self._tensors: list[torch.Tensor] = []
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        on_gpu = self._device.type == "cuda"
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=on_gpu)
        self._array = self._host.numpy()
        self._lengths = []
        self._there = torch.empty(capacity, dtype=torch.int64, device=self._device) if on_gpu else self._host

    def send(self, arrays: Sequence[IntArray]) -> list[torch.Tensor]:
        """The arrays on the device, in order; valid until the next send. The same tensors for arrays of the same lengths."""
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
        if lengths != self._lengths:
            self._lengths = lengths
            self._tensors = list(torch.split(self._there[:num_numbers], lengths))
        return self._tensors


_SHARED_NUMBERS = 3
"""Numbers copied to the device per decode: token, start and length."""
_NUMBERS_PER_GROUP = 4
"""The same for each group: row, slot, and a new block with its index."""
_NO_NUMBERS = np.empty(0, dtype=np.int64)


class StepSizes(NamedTuple):
    """Largest sizes of a step."""

    max_num_seqs: int = 1
    max_num_tokens: int = 1
    max_blocks_per_seq: int = 1


class GroupTensors(NamedTuple):
    """The blocks of one group on the device, for the parts of a step in order."""

    rows: torch.Tensor
    """[N] int64: row of the part's sequence in the block tables."""
    block_tables: torch.Tensor
    """[max_num_seqs, max_blocks_per_seq] int32; a row is valid from the first block that the part reads to its last token's."""
    slot_mapping: torch.Tensor
    """[ΣT] int64: block_id · block_size + offset in the block, where the token's KV is written."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The parts of a step, concatenated to one row of ΣT tokens. Built once per step, shared by all layers.

    Tables and slots are those of one group of layers, the rest is the same in all of them. It is valid until the Packer packs the
    next step, which has the same buffers.
    """

    block_size: int
    device: torch.device
    layout: KVLayout
    starts: list[int]
    """Per part: position of its first new token = number of tokens whose KV its blocks hold."""
    starts_there: torch.Tensor
    """[N] int64 on the device: `starts`."""
    query_lens_there: torch.Tensor
    """[N] int64 on the device: `query_lens`."""
    groups: tuple[GroupTensors, ...]
    input_ids: torch.Tensor
    """[1, ΣT] int64."""
    position_ids: torch.Tensor
    """[1, ΣT] int64: position of each token in its own sequence."""
    encoders: EncoderTables | None = None
    """What cross attention reads; None: the model has no encoder. The Packer does not set it."""

    @property
    def query_lens(self) -> list[int]:
        """Per part: number of new tokens, at least 1."""
        return self.layout.query_lens

    @property
    def offsets(self) -> list[int]:
        """Per part: index of its first token in the packed row."""
        return self.layout.offsets

    @property
    def num_tokens(self) -> int:
        return self.layout.offsets[-1] + self.layout.query_lens[-1]

    @property
    def context_lens(self) -> list[int]:
        """Per part: number of tokens with KV after this step."""
        return [start + length for start, length in zip(self.starts, self.query_lens, strict=True)]

    def slots(self, part: int, first: int, end: int, group: int = 0) -> IntArray:
        """Slots of the part's positions first … end − 1, int64 [end − first]. `first`: not before the window of its first token."""
        blocks, offsets = np.divmod(np.arange(first, end, dtype=np.int64), self.block_size)
        result: IntArray = self.layout.groups[group].arrays[part][blocks] * self.block_size + offsets
        return result

    def gather_tables(self, width: int, group: int = 0) -> torch.Tensor:
        """[N, width] int32 on the device: the parts' tables, cut to `width` blocks; 0 before the first block that the
        part reads. Entries after its last token may have any value."""
        tensors, window = self.groups[group], self.layout.groups[group].group.window
        gathered = tensors.block_tables[:, :width].index_select(0, tensors.rows)
        if window is None:
            return gathered
        # Kernels read whole tiles of keys, and hide some. A block before the window may hold anything, the null block is zero.
        firsts = (self.starts_there + 1 - window).clamp_(min=0) // self.block_size
        columns = torch.arange(gathered.shape[1], device=self.device)
        return gathered.masked_fill_(columns < firsts[:, None], 0)

    def shared_prefixes(self, min_saved_tokens: int, max_query_len: int, group: int = 0) -> list[SharedPrefix]:
        """The shared prefixes of parts with at most `max_query_len` new tokens: see find_shared_prefixes. Steps with one layout
        share the result.

        There are none in a group with a window: sequences that share blocks read them only near their beginning.
        """
        layout = self.layout.groups[group]
        if layout.group.window is not None:
            return []
        prefixes = layout.prefixes
        key = (min_saved_tokens, max_query_len)
        if key not in prefixes:
            short = [index for index, length in enumerate(self.query_lens) if length <= max_query_len]
            tables, starts = [layout.tables[index] for index in short], [self.starts[index] for index in short]
            shared = find_shared_prefixes(tables, starts, self.block_size, min_saved_tokens)
            prefixes[key] = [
                SharedPrefix([short[part] for part in prefix.parts], prefix.num_blocks) for prefix in shared
            ]
        return prefixes[key]


class Packer:
    """Packs step after step in the same buffers. The block tables stay on the device between steps."""

    def __init__(
        self, block_size: int, groups: Sequence[BlockGroup], device: torch.device, sizes: StepSizes | None = None
    ) -> None:
        """The buffers are allocated for `sizes`; they grow if a step needs more."""
        sizes = sizes or StepSizes()
        self._block_size = block_size
        self._groups = tuple(groups)
        self._device = device
        self.block_tables = [BlockTables(device, sizes.max_num_seqs, sizes.max_blocks_per_seq) for _ in groups]
        per_part = _SHARED_NUMBERS - 1 + _NUMBERS_PER_GROUP * len(groups)
        self._staging = Staging(device, sizes.max_num_tokens + per_part * sizes.max_num_seqs)
        self._layout: KVLayout | None = None
        """Layout of the last step; `_packing` and `_tensors` are of the last step, too."""
        self._packing: Packing | None = None
        self._tensors: list[torch.Tensor] = []
        """Tensors as they were sent, in the order of `_send`."""
        self._allocate(sizes.max_num_tokens)

    def _allocate(self, max_num_tokens: int) -> None:
        self._indices = torch.arange(max_num_tokens, device=self._device)
        self._positions = torch.empty_like(self._indices)
        self._slots = [torch.empty_like(self._indices) for _ in self._groups]

    def pack(self, parts: Sequence[SequencePart]) -> Packing:
        """Lay out the parts in order.

        Raises PackingError, without a change, if a part is empty, has not one table per group, a table is too short, or an entry
        that is read or written is no block in 1 … num_blocks − 1 (block 0 is the null block, which is never written).
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
            # The device may have some of the changes.
            self._layout = self._packing = None
            for tables in self.block_tables:
                tables.forget()
            raise

    def _keep_layout(self, parts: Sequence[SequencePart]) -> list[Changes] | None:
        """Keep the layout of the step before, if it is one of the same decodes; returns the blocks appended to its tables, by
        group. None, without a change, if the step needs a layout of its own, or is wrong."""
        layout = self._layout
        if layout is None:
            return None
        all_grown = layout.growth(parts, self._block_size)
        if all_grown is None:
            return None
        each = list(zip(layout.groups, self.block_tables, all_grown, strict=True))
        for group, tables, grown in each:
            if not all(0 < block < group.group.num_blocks for block in grown.values()):
                return None
            if not tables.has_room(group.tables[part] for part in grown):
                return None
        return [self._append(group, tables, grown) if grown else NO_CHANGES for group, tables, grown in each]

    def _append(self, group: GroupLayout, tables: BlockTables, grown: dict[int, int]) -> Changes:
        """Append a block to the tables of these parts."""
        places = []
        for part, block in grown.items():
            table = group.tables[part] = [*group.tables[part], block]
            place, group.arrays[part] = tables.append(int(group.rows[part]), table)
            places.append(place)
        return Changes(np.array(places, dtype=np.int64), np.array(list(grown.values()), dtype=np.int64))

    def _lay_out(self, parts: Sequence[SequencePart], starts: list[int]) -> list[Changes]:
        """Make a layout for the step; returns the entries of the block tables that differ from the step before, by group. Raises
        PackingError."""
        query_lens = [len(part.token_ids) for part in parts]
        for index, part in enumerate(parts):
            self._check(index, part)
        checked = [self._group_of(index, group, parts, query_lens) for index, group in enumerate(self._groups)]
        # Everything is checked: from here on nothing is refused.
        layouts: list[GroupLayout] = []
        changes: list[Changes] = []
        for group, block_tables, (sources, tables, firsts, num_known) in zip(
            self._groups, self.block_tables, checked, strict=True
        ):
            placement = block_tables.place(tables, [id(source) for source in sources], firsts, num_known)
            layouts.append(GroupLayout(group, sources, tables, placement.tables, placement.rows, firsts))
            changes.append(placement.changes)
        offsets = [end - length for end, length in zip(accumulate(query_lens), query_lens, strict=True)]
        self._layout = KVLayout(tuple(layouts), query_lens, offsets)
        return changes

    def _group_of(
        self, index: int, group: BlockGroup, parts: Sequence[SequencePart], query_lens: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int], list[int]]:
        """The tables of the parts in group `index`, whole and as the layout has them; the first entries that are read, and the end
        of those that are known. Raises PackingError."""
        size = self._block_size
        sources = [part.block_tables[index] for part in parts]
        tables = [
            source[: -(-(part.start + length) // size)]
            for source, part, length in zip(sources, parts, query_lens, strict=True)
        ]
        firsts = [group.first_block(part.start, size) for part in parts]
        num_known = self.block_tables[index].num_known(tables, [id(source) for source in sources], firsts)
        for number, (part, table, count) in enumerate(zip(parts, tables, num_known, strict=True)):
            self._check_table(number, part, table, count, group)
        _check_one_writer(tables, [part.start for part in parts], size)
        return sources, tables, firsts, num_known

    def _send(
        self, layout: KVLayout, parts: Sequence[SequencePart], starts: list[int], all_changes: Sequence[Changes]
    ) -> Packing:
        """Send the step to the device."""
        num_tokens = layout.offsets[-1] + layout.query_lens[-1]
        ids = np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int64, num_tokens)
        start_array, lengths = np.array(starts, dtype=np.int64), np.array(layout.query_lens, dtype=np.int64)
        is_decodes = layout.is_decodes
        # From a token's index in the row to its position. A decode's is its start.
        shifts = _NO_NUMBERS if is_decodes else start_array - layout.offsets
        arrays, num_changes, slots = [ids, start_array, lengths, shifts], 0, _NO_NUMBERS
        if is_decodes:
            offsets = start_array % self._block_size
        for group, block_tables, changes in zip(layout.groups, self.block_tables, all_changes, strict=True):
            if is_decodes:
                last_blocks = np.array([table[-1] for table in group.tables], dtype=np.int64)
                slots = last_blocks * self._block_size + offsets
            if len(changes.places):
                changes = block_tables.write(changes)
                num_changes += len(changes.places)
            arrays += group.rows, slots, changes.places, changes.blocks
        tensors = self._staging.send(arrays)
        if num_changes:
            for block_tables, places, blocks in zip(
                self.block_tables, tensors[6::_NUMBERS_PER_GROUP], tensors[7::_NUMBERS_PER_GROUP], strict=True
            ):
                block_tables.tensor.view(-1).index_copy_(0, places, blocks.to(torch.int32))
        before = self._packing
        if before is not None and before.layout is layout and tensors is self._tensors:
            self._packing = replace(before, starts=starts)  # the same tensors, with the new numbers
            return self._packing
        self._tensors = tensors
        input_ids, positions, query_lens, sent = tensors[:4]
        all_rows, all_slots, first_positions = tensors[4::_NUMBERS_PER_GROUP], tensors[5::_NUMBERS_PER_GROUP], positions
        if not is_decodes:
            positions, all_slots = self._locate(query_lens, all_rows, sent, num_tokens)
        self._packing = Packing(
            block_size=self._block_size,
            device=self._device,
            layout=layout,
            starts=starts,
            starts_there=first_positions,
            query_lens_there=query_lens,
            groups=tuple(
                GroupTensors(rows, block_tables.tensor, slots)
                for rows, block_tables, slots in zip(all_rows, self.block_tables, all_slots, strict=True)
            ),
            input_ids=input_ids[None],
            position_ids=positions[None],
        )
        return self._packing

    def _locate(
        self, query_lens: torch.Tensor, all_rows: Sequence[torch.Tensor], shifts: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Position of each token, and its slot in each group, computed on the device. shifts: [N], first position − first index in
        the row."""
        if num_tokens > self._indices.numel():
            self._allocate(1 << (num_tokens - 1).bit_length())
        positions = self._positions[:num_tokens]
        all_slots = [slots[:num_tokens] for slots in self._slots]
        part = torch.repeat_interleave(query_lens, output_size=num_tokens)
        torch.add(self._indices[:num_tokens], shifts[part], out=positions)
        columns, offsets = positions // self._block_size, positions % self._block_size
        for rows, block_tables, slots in zip(all_rows, self.block_tables, all_slots, strict=True):
            torch.add(offsets, block_tables.tensor[rows[part], columns], alpha=self._block_size, out=slots)
        return positions, all_slots

    def _check(self, index: int, part: SequencePart) -> None:
        """Raises PackingError if the part has no tokens, or not one table for each group."""
        if not part.token_ids or part.start < 0:
            raise PackingError(f"part {index} has {len(part.token_ids)} tokens from position {part.start}")
        if len(part.block_tables) != len(self._groups):
            raise PackingError(
                f"part {index} has {len(part.block_tables)} block tables, the model has {len(self._groups)} groups of layers"
            )

    def _check_table(self, index: int, part: SequencePart, table: list[int], num_known: int, group: BlockGroup) -> None:
        """Raises PackingError if the table is too short, or has a block that the group has not. Checks only new entries of the
        table, and none before the first one that the part reads."""
        needed = -(-(part.start + len(part.token_ids)) // self._block_size)
        if len(table) < needed:
            raise PackingError(
                f"part {index} needs {needed} blocks of {self._block_size} tokens, its table has {len(table)}"
            )
        new = table[num_known:]
        if new and (min(new) < 1 or max(new) >= group.num_blocks):
            raise PackingError(f"part {index} has a block outside 1 … {group.num_blocks - 1}: {table}")


def pack(parts: Sequence[SequencePart], block_size: int, groups: Sequence[BlockGroup], device: torch.device) -> Packing:
    """Lay out one step, in buffers of its own. See Packer.pack."""
    return Packer(block_size, groups, device).pack(parts)


def _check_one_writer(tables: Sequence[list[int]], starts: Sequence[int], block_size: int) -> None:
    # Two sequences that write one block would corrupt each other silently; sealed blocks are never written.
    written = [block for table, start in zip(tables, starts, strict=True) for block in table[start // block_size :]]
    if len(set(written)) != len(written):
        raise PackingError("two tokens of the step write the same slot: two parts share a block that is not sealed")
