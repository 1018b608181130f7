"""The blocks of one group of a worker, and the picture in which each of them last changed."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool.v1 import cache_pb2

_COLUMNS: Final = (("states", "u1"), ("ref_counts", "<u2"), ("last_used", "<u4"), ("salt_numbers", "<u2"))
"""Fields of BlockPicture with the type of their entries, little-endian as on the wire."""


class PoolPicture:
    """The blocks of a pool that were ever granted; all others are free."""

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in _COLUMNS}
        self._changed_at: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)

    def __len__(self) -> int:
        return len(self._changed_at)

    def apply(self, blocks: cache_pb2.BlockPicture, number: int) -> None:
        """Take in the changes of the gateway's picture `number`. Raises ValueError if the lists have different lengths."""
        columns = {name: np.frombuffer(getattr(blocks, name), kind) for name, kind in _COLUMNS}
        num_blocks = len(columns["states"])
        ids = np.asarray(blocks.block_ids, np.int64) if blocks.block_ids else None
        if any(len(column) != num_blocks for column in columns.values()) or (
            ids is not None and len(ids) != num_blocks
        ):
            raise ValueError("the lists of a BlockPicture have different lengths")
        if num_blocks == 0:
            return
        end = int(ids.max()) + 1 if ids is not None else blocks.first_block + num_blocks
        if end > len(self):
            self._grow(end)
        where: npt.NDArray[np.int64] | slice = slice(blocks.first_block, end) if ids is None else ids
        for name, column in columns.items():
            self._columns[name][where] = column
        self._changed_at[where] = number

    def _grow(self, num_blocks: int) -> None:
        more = num_blocks - len(self)
        for name, kind in _COLUMNS:
            fill = cache_pb2.BLOCK_STATE_FREE if name == "states" else 0
            self._columns[name] = np.concatenate([self._columns[name], np.full(more, fill, kind)])
        self._changed_at = np.concatenate([self._changed_at, np.zeros(more, np.uint64)])

    def as_json(self, since: int) -> list[dict[str, Any]]:
        """Return the blocks that have changed after the gateway's picture `since`; 0: all."""
        if since == 0:
            return [self._entry(slice(None), first=0, ids=None)] if len(self) else []
        changed = np.flatnonzero(self._changed_at > since)
        if not len(changed):
            return []
        return [self._entry(changed, first=None, ids=_base64(changed.astype("<u4")))]

    def _entry(self, where: slice | npt.NDArray[np.int64], *, first: int | None, ids: str | None) -> dict[str, Any]:
        return {"first": first, "ids": ids, **{name: _base64(self._columns[name][where]) for name, _ in _COLUMNS}}


def _base64(column: npt.NDArray[Any]) -> str:
    return base64.b64encode(column.tobytes()).decode()
