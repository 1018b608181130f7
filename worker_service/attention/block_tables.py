"""The block tables of the running sequences in one tensor on the device; only changes are copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class Changes(NamedTuple):
    """Entries to copy to the device."""

    places: IntArray
    """[M] indices into the flattened tensor."""
    blocks: IntArray
    """[M] block ids to write there."""


NO_CHANGES = Changes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class Placement(NamedTuple):
    """The rows of a step's tables, and the entries to copy to the device."""

    rows: IntArray
    """[N] row of each table; two tables of a step have different rows unless they are the same list."""
    tables: list[IntArray]
    """The tables as arrays; views, valid until the next placement."""
    changes: Changes


class BlockTables:
    """[max_num_seqs, max_blocks_per_seq] block ids of one group; grows as needed.

    A sequence keeps its row until no row is free for another one; then the least recently used row is reassigned. Entries of a row
    that the tables of the step do not have, or do not read (before `firsts`), are left from earlier ones. The device executes steps
    and changes in order, so a row changes only after the step that used it.

    The result does not depend on a row's earlier owner: the host has a copy of the tensor, and every entry that differs from the
    table is written.
    """

    def __init__(self, device: torch.device, max_num_seqs: int = 1, max_blocks_per_seq: int = 1) -> None:
        self._device = device
        self._allocate(max_num_seqs, max_blocks_per_seq)

    def _allocate(self, num_rows: int, width: int) -> None:
        self.tensor = torch.zeros(num_rows, width, dtype=torch.int32, device=self._device)
        """[max_num_seqs, max_blocks_per_seq] int32, on the device."""
        self._shared = self.tensor.view(-1).numpy() if self._device.type == "cpu" else None
        """The tensor's memory, if the host can write it."""
        self.forget()

    def forget(self) -> None:
        """Assume nothing about the tensor on the device; every table is written again."""
        num_rows, width = self.tensor.shape
        # 0 means unknown: no table reads the null block. Zeros take memory only once they are written.
        self._copy = np.zeros((num_rows, width), dtype=np.int64)
        self._seen: list[list[int]] = [[] for _ in range(num_rows)]
        """The table last written to each row, as a list: lists are compared faster than converted to arrays."""
        self._since = [0] * num_rows
        """The entry of that table from which on the row has it."""
        self._row_of: dict[int, int] = {}
        """Row by the id() of the table, least recently placed first. A new list with the id of a deleted one gets its row, which
        costs only the writing."""
        self._free = list(range(num_rows - 1, -1, -1))

    def num_known(self, tables: Sequence[list[int]], keys: Sequence[int], firsts: Sequence[int]) -> list[int]:
        """Per table, the end of the entries from `first` on that its row already holds."""
        return [
            self._num_known(table, self._row_of.get(key), first)
            for table, key, first in zip(tables, keys, firsts, strict=True)
        ]

    def _num_known(self, table: list[int], row: int | None, first: int) -> int:
        if row is None or self._since[row] > first:
            return first
        seen = self._seen[row]
        if len(seen) > len(table):
            seen = seen[: len(table)]
        if len(seen) <= first:
            return first
        return len(seen) if table[first : len(seen)] == (seen[first:] if first else seen) else first

    def place(
        self, tables: Sequence[list[int]], keys: Sequence[int], firsts: Sequence[int], num_known: Sequence[int]
    ) -> Placement:
        """Assign a row to every table. The caller writes the changes to the tensor before the step.

        tables: lists that no longer change. keys: the same for the same sequence in different steps. firsts: the first entry of
        each that is read. num_known: the result of num_known for these tables.
        """
        if self._grow(len(set(keys)), max(map(len, tables))):
            num_known = firsts
        rows = self._rows(keys)
        width = self._copy.shape[1]
        places: list[IntArray] = []
        blocks: list[IntArray] = []
        for table, row, first, end in zip(tables, rows, firsts, num_known, strict=True):
            if end < len(table):
                columns = self._update(row, table, end)
                self._since[row] = first
                places.append(columns + row * width)
                blocks.append(self._copy[row, columns])
        return Placement(
            rows=np.array(rows, dtype=np.int64),
            tables=[self._copy[row, : len(table)] for row, table in zip(rows, tables, strict=True)],
            changes=Changes(np.concatenate(places), np.concatenate(blocks)) if places else NO_CHANGES,
        )

    def has_room(self, tables: Iterable[list[int]]) -> bool:
        """Whether each of the tables can grow by a block."""
        width = self._copy.shape[1]
        return all(len(table) < width for table in tables)

    def append(self, row: int, table: list[int]) -> tuple[int, IntArray]:
        """The table of a row has grown by its last block, for which there is room. Returns the place of that block in the flattened
        tensor, where the caller writes it, and the table as an array."""
        self._copy[row, len(table) - 1] = table[-1]
        self._seen[row] = table
        return row * self._copy.shape[1] + len(table) - 1, self._copy[row, : len(table)]

    def write(self, changes: Changes) -> Changes:
        """Write changes of this step. Returns those that must be copied to the device; none if the host can write its memory."""
        if self._shared is None:
            return changes
        self._shared[changes.places] = changes.blocks
        return NO_CHANGES

    def _grow(self, num_rows: int, width: int) -> bool:
        have_rows, have_width = self.tensor.shape
        if num_rows <= have_rows and width <= have_width:
            return False
        self._allocate(_large_enough(have_rows, num_rows), _large_enough(have_width, width))
        return True

    def _rows(self, keys: Sequence[int]) -> list[int]:
        for key in keys:
            row = self._row_of.pop(key, None)
            if row is not None:  # to the end: placed last
                self._row_of[key] = row
        for key in keys:
            if key not in self._row_of:
                # Rows of this step are at the end, and there are at least as many rows as tables.
                row = self._free.pop() if self._free else self._row_of.pop(next(iter(self._row_of)))
                self._row_of[key] = row
        return [self._row_of[key] for key in keys]

    def _update(self, row: int, table: list[int], num_known: int) -> IntArray:
        """Write the table to the host's copy of the row; returns the indices in the row that were different."""
        new = np.array(table[num_known:], dtype=np.int64)
        have = self._copy[row, num_known : len(table)]
        places: IntArray = np.flatnonzero(have != new) + num_known
        have[:] = new
        self._seen[row] = table
        return places


def _large_enough(have: int, needed: int) -> int:
    """The next power of two, so that the tensor rarely grows."""
    return max(have, 1 << (needed - 1).bit_length())
