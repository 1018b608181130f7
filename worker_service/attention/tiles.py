"""Tiles: which rows of a step attend to which keys together, and in which order a row's results are merged.

The KV of a sequence is cut into segments. A tile is a set of rows that attend to the keys of one segment. If segments have a fixed
length (`partition`), the segments that a row sees, from left to right, depend only on its position and the layer's window; which
rows share a tile changes only the time.

One segment [a, b), and the rows of one part (new tokens at positions t from `start` up) under a window of w tokens:

| rows                          | visible keys       | kind                          |
|-------------------------------|--------------------|-------------------------------|
| t < a                         | nothing            |                               |
| a ≤ t < b                     | up to themselves   | DIAGONAL                      |
| b ≤ t < a + w                 | everything         | LEAVING, STEADY, or ENTERING  |
| max(b, a + w) ≤ t < b + w − 1 | its end            | FRONT                         |
| b + w − 1 ≤ t                 | nothing            |                               |

In cross attention the keys are an encoder's output, and all rows see all of them: CROSS.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from .encoder_tables import EncoderTables
from .packing import Packing
from .shared_prefix import SharedPrefix


class TileKind(IntEnum):
    """The kinds of tiles, in the order in which a row sees them from left to right."""

    FRONT = 0
    """Each row's window begins inside the segment. One per row at most."""
    SHARED = 1
    """All rows of several parts see the whole segment, which has the same blocks for all of them."""
    LEAVING = 2
    """Rows of a part see the whole segment; the rows after them do not."""
    STEADY = 3
    """All rows of a part see the whole segment."""
    ENTERING = 4
    """The last rows of a part see the whole segment; the rows before them do not."""
    DIAGONAL = 5
    """Rows of a part that are in the segment. One per row."""
    CROSS = 6
    """All rows of the parts with one encoder's output see all of a segment of it, whose last one may be short."""


class TileRows(NamedTuple):
    """New tokens of one part, by position."""

    part: int
    first: int
    end: int


class Tile(NamedTuple):
    """Rows that attend to keys of one segment."""

    kind: TileKind
    rows: tuple[TileRows, ...]
    """Rows of one part, or of all parts that share the segment."""
    first: int
    """Position of the first key; a multiple of the partition, if there is one."""
    end: int
    """Position after the last key."""

    @property
    def num_rows(self) -> int:
        return sum(rows.end - rows.first for rows in self.rows)

    @property
    def num_keys(self) -> int:
        return self.end - self.first


def make_tiles(
    packing: Packing, group: int, window: int | None, min_shared_tokens: int, partition: int | None
) -> list[Tile]:
    """All tiles of a step for layers of one group and window, in an order that has each row's keys from left to right.

    partition: length of the segments, which begin at its multiples; None: one segment for a shared prefix, one for the rest.
    """
    tiles: list[Tile] = []
    firsts = [0] * len(packing.starts)
    for prefix in _shared_prefixes(packing, group, window, min_shared_tokens, partition):
        rows = tuple(TileRows(part, packing.starts[part], packing.context_lens[part]) for part in prefix.parts)
        length = prefix.num_blocks * packing.block_size
        step = length if partition is None else partition
        for first in range(0, length - step + 1, step):
            tiles.append(Tile(TileKind.SHARED, rows, first, first + step))
            for part in prefix.parts:
                firsts[part] = first + step
    context_lens = packing.context_lens
    for part, first in enumerate(firsts):
        new = TileRows(part, packing.starts[part], context_lens[part])
        tiles.extend(_own_tiles(new, first, window, partition))
    return sorted(tiles, key=lambda tile: (tile.kind, tile.first))


def make_cross_tiles(packing: Packing, encoders: EncoderTables, partition: int | None) -> list[Tile]:
    """All tiles of a step for cross attention, in an order that has each row's keys from left to right. Keys are positions of the
    encoder's input. Parts with the same blocks read them once."""
    sharers: dict[tuple[tuple[int, ...], int], list[TileRows]] = {}
    for part, (start, end) in enumerate(zip(packing.starts, packing.context_lens, strict=True)):
        sharers.setdefault((encoders.tables[part], encoders.num_tokens[part]), []).append(TileRows(part, start, end))
    tiles = [
        Tile(TileKind.CROSS, tuple(rows), first, min(first + (partition or length), length))
        for (_, length), rows in sharers.items()
        for first in range(0, length, partition or length)
    ]
    return sorted(tiles, key=lambda tile: tile.first)


def _shared_prefixes(
    packing: Packing, group: int, window: int | None, min_shared_tokens: int, partition: int | None
) -> Iterator[SharedPrefix]:
    if window is not None:
        return
    for prefix in packing.shared_prefixes(min_shared_tokens, packing.num_tokens, group):
        length = prefix.num_blocks * packing.block_size
        whole = length if partition is None else length - length % partition
        if (len(prefix.parts) - 1) * whole >= min_shared_tokens:
            yield prefix


def _own_tiles(rows: TileRows, first: int, window: int | None, partition: int | None) -> Iterator[Tile]:
    """Tiles of one part's rows over the keys from position `first`, where a segment begins."""
    if window is not None:
        first = max(first, rows.first + 1 - window)
    if partition is None:
        yield Tile(TileKind.DIAGONAL, (rows,), first, rows.end)
        return
    sight = rows.end if window is None else window
    for begin in range(first // partition * partition, rows.end, partition):
        end = begin + partition
        inside = _between(rows, begin, end)
        after = _between(rows, end, begin + sight)
        far = _between(rows, max(end, begin + sight), end + sight - 1)
        if inside:
            yield Tile(TileKind.DIAGONAL, (inside,), begin, min(end, inside.end))
        if after:
            yield Tile(_kind(after, rows), (after,), begin, end)
        if far:
            yield Tile(TileKind.FRONT, (far,), begin, end)


def _between(rows: TileRows, first: int, end: int) -> TileRows | None:
    first, end = max(first, rows.first), min(end, rows.end)
    return TileRows(rows.part, first, end) if first < end else None


def _kind(after: TileRows, rows: TileRows) -> TileKind:
    if after.end < rows.end:
        return TileKind.LEAVING
    return TileKind.STEADY if after.first == rows.first else TileKind.ENTERING
