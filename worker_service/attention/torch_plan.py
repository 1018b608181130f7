"""The torch backend's plan of one step: its tiles in a few large batches."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .encoder_tables import slots_of
from .packing import Packing
from .tiles import Tile, TileKind, make_cross_tiles, make_tiles

_MAX_PADDING_SHARE = 0.5
"""A tile shorter than this share of a batch's longest goes into another batch."""
_MAX_BATCH_TOKENS = 1 << 16
"""Rows or keys of a batch, the larger number: it bounds the memory of one call. A single tile may have more."""


class PlanShapes(NamedTuple):
    """Constraints on the shapes of kernel calls."""

    partition: int | None
    """Length of the segments that keys are cut into, see make_tiles."""
    row_multiple: int
    """Rows of a tile are padded to a multiple of this."""
    key_multiple: int
    """Keys of a tile are padded to a multiple of this, which divides the partition."""
    value_multiple: int = 1
    """Heads of V are padded with zeros to a multiple of this size."""
    own_sums: bool = False
    """Sum in a fixed order (softmax.py) instead of using torch's matrix products."""


class Span(NamedTuple):
    """A range of a batch's rows without duplicates."""

    first: int
    end: int
    rows: torch.Tensor | None
    """[end − first] packed rows; None: all rows of the step in order."""
    is_first: bool
    """Whether its keys are the first ones of all its rows."""


class TileBatch(NamedTuple):
    """Tiles with the same number of rows, and keys padded to the same number."""

    num_tiles: int
    num_rows: int
    """T, of each tile."""
    rows: torch.Tensor | None
    """[B · T] packed rows, tile after tile; None: all rows of the step in order."""
    kv_slots: torch.Tensor
    """[B · S] slots; slot 0 of the null block for keys that no row of the tile sees."""
    mask: torch.Tensor | None
    """[B, 1, T', S] additive, in the KV's dtype; T' is 1 if all rows see the same keys, or T padded to the row multiple. None: see
    causal."""
    causal: bool
    """Row t of each tile sees keys 0 … t."""
    spans: list[Span]
    distances: torch.Tensor | None = None
    """[B, T', S] int64 instead of a mask, for layers with a bias by distance, T' as T padded: positions from a key to a query;
    −1 where a row may not see a key."""


class View(NamedTuple):
    """The plan for layers with the same window. The spans of all batches, in order, have each row's keys from left to right."""

    batches: list[TileBatch]
    shapes: PlanShapes

    @property
    def merges(self) -> bool:
        """Whether any row has keys in more than one span."""
        return not all(span.is_first for batch in self.batches for span in batch.spans)


class Sight(NamedTuple):
    """Which keys the rows of a layer see, and whether their scores depend on positions. Layers with the same sight have one
    view."""

    group: int
    """The group whose blocks they read."""
    window: int | None
    """Sliding window in tokens; None: full attention."""
    is_cross: bool = False
    """Whether the keys are those of encoders' outputs."""
    is_biased: bool = False
    """Whether scores have a bias by distance."""


def build_view(packing: Packing, sight: Sight, dtype: torch.dtype, min_shared_tokens: int, shapes: PlanShapes) -> View:
    """Batches of all parts."""
    if sight.is_cross:
        assert packing.encoders is not None, "the runner gives the encoders of a model that has cross attention"
        tiles = make_cross_tiles(packing, packing.encoders, shapes.partition)
    else:
        tiles = make_tiles(packing, sight.group, sight.window, min_shared_tokens, shapes.partition)
    builder = _Builder(packing, sight, dtype, shapes)
    return View([builder.build(group) for group in _groups(tiles, sight.window)], shapes)


def _groups(tiles: list[Tile], window: int | None) -> Iterator[list[Tile]]:
    """Tiles of one kind that fit into one batch; the tiles of a row stay in order."""
    for kind, of_kind in groupby(tiles, key=lambda tile: tile.kind):
        groups: dict[Hashable, list[Tile]] = {}
        for tile in of_kind:
            groups.setdefault(_group_key(tile, window), []).append(tile)
        for members in groups.values():
            if kind == TileKind.DIAGONAL:
                members.sort(key=lambda tile: -tile.num_keys)
            if kind == TileKind.CROSS:
                members.sort(key=lambda tile: (tile.first, -tile.num_keys))
            yield from _cut(members)


def _group_key(tile: Tile, window: int | None) -> Hashable:
    if tile.kind == TileKind.SHARED:
        return tile.rows
    if tile.kind in (TileKind.LEAVING, TileKind.ENTERING):
        # A part has a sequence of such tiles with different numbers of rows.
        return tile.first, tile.num_rows
    return tile.num_rows, _is_causal(tile, window)  # never causal in cross attention


def _is_causal(tile: Tile, window: int | None) -> bool:
    """Row t sees keys 0 … t, and there is more than one row."""
    if tile.kind != TileKind.DIAGONAL or tile.num_rows != tile.num_keys or tile.num_rows == 1:
        return False
    return window is None or tile.num_rows <= window


def _cut(tiles: list[Tile]) -> Iterator[list[Tile]]:
    """Groups, longest first, within the limits of padding and size."""
    group: list[Tile] = []
    for tile in tiles:
        if group:
            too_short = tile.num_keys < _MAX_PADDING_SHARE * group[0].num_keys
            size = max(group[0].num_keys, tile.num_rows)
            if too_short or (len(group) + 1) * size > _MAX_BATCH_TOKENS:
                yield group
                group = []
        group.append(tile)
    yield group


class _Builder:
    """Builds the tensors of groups of tiles, in the order of merging."""

    def __init__(self, packing: Packing, sight: Sight, dtype: torch.dtype, shapes: PlanShapes) -> None:
        self._packing, self._sight, self._dtype, self._shapes = packing, sight, dtype, shapes
        self._window = sight.window
        self._all_rows = np.arange(packing.num_tokens)
        self._seen = np.zeros(packing.num_tokens, dtype=bool)

    def build(self, tiles: list[Tile]) -> TileBatch:
        num_rows = tiles[0].num_rows
        rows = np.concatenate([self._rows(tile) for tile in tiles])
        biased = self._sight.is_biased
        causal = _is_causal(tiles[0], self._window) and not biased
        width = _round_up(max(tile.num_keys for tile in tiles), self._shapes.key_multiple)
        slots = np.zeros((len(tiles), width), dtype=np.int64)
        for index, tile in enumerate(tiles):
            # A segment is summed from its beginning, also where its first keys lie before the window of all rows, so that a key has
            # the same place in the product in every step. In place of such keys, whose blocks may be gone, is slot 0 of the null
            # block, as in the padding: they are hidden, and their weights are exact zeros. So the bits of a row are the same
            # whether a key before its window is read for another row of the tile, is not read, or has no block any more.
            first = tile.first
            if self._window is not None:
                first = max(first, tile.rows[0].first + 1 - self._window)
            slots[index, first - tile.first : tile.num_keys] = self._slots(tile, first)
        return TileBatch(
            num_tiles=len(tiles),
            num_rows=num_rows,
            rows=self._index(rows),
            kv_slots=self._to_device(slots.reshape(-1)),
            mask=None if causal or biased else self._mask(tiles, width),
            causal=causal,
            spans=[self._span(rows, first, end) for first, end in _span_bounds(tiles)],
            distances=self._distances(tiles, width) if biased else None,
        )

    def _slots(self, tile: Tile, first: int) -> npt.NDArray[np.int64]:
        """Slots of the tile's keys from position `first` on."""
        packing, part = self._packing, tile.rows[0].part
        if tile.kind == TileKind.CROSS:
            assert packing.encoders is not None, "see build_view"
            return slots_of(packing.encoders.tables[part], first, tile.end, packing.block_size)
        return packing.slots(part, first, tile.end, self._sight.group)

    def _rows(self, tile: Tile) -> npt.NDArray[np.int64]:
        """Indices of a tile's rows in the packed row."""
        shifts = [self._packing.offsets[rows.part] - self._packing.starts[rows.part] for rows in tile.rows]
        ranges = [np.arange(r.first + shift, r.end + shift) for r, shift in zip(tile.rows, shifts, strict=True)]
        return ranges[0] if len(ranges) == 1 else np.concatenate(ranges)

    def _distances(self, tiles: list[Tile], width: int) -> torch.Tensor:
        """The distances of a TileBatch. Rows of the padding see the first key."""
        num_rows = tiles[0].num_rows
        padded = _round_up(num_rows, self._shapes.row_multiple)
        distances = np.full((len(tiles), padded, width), -1, dtype=np.int64)
        distances[:, num_rows:, 0] = 0
        for index, tile in enumerate(tiles):
            queries = np.concatenate([np.arange(rows.first, rows.end) for rows in tile.rows])
            keys = np.arange(tile.first, tile.end)
            distance = queries[:, None] - keys
            seen = distance >= 0 if self._window is None else (distance >= 0) & (distance < self._window)
            distances[index, :num_rows, : tile.num_keys] = np.where(seen, distance, -1)
        return torch.from_numpy(distances).to(self._packing.device)

    def _span(self, rows: npt.NDArray[np.int64], first: int, end: int) -> Span:
        members = rows[first:end]
        is_first = not self._seen[members].any()
        self._seen[members] = True
        return Span(first, end, self._index(members), is_first)

    def _mask(self, tiles: list[Tile], width: int) -> torch.Tensor | None:
        """−inf where a row may not see a key; None if every row sees every key."""
        if tiles[0].kind == TileKind.CROSS:
            return self._mask_of_padding(tiles, width)
        if tiles[0].kind not in (TileKind.DIAGONAL, TileKind.FRONT):
            return None
        num_rows = tiles[0].num_rows
        key = np.arange(width)[None, None, :] + np.array([tile.first for tile in tiles])[:, None, None]
        query = np.arange(num_rows)[None, :, None] + np.array([tile.rows[0].first for tile in tiles])[:, None, None]
        # Padding is after the last key of its tile, so the causal rule hides it too.
        hidden = key > query
        if self._window is not None:
            hidden |= key <= query - self._window
        if not hidden.any():
            return None
        padded = 1 if num_rows == 1 else _round_up(num_rows, self._shapes.row_multiple)
        mask = torch.zeros((len(tiles), padded, width), dtype=self._dtype)
        mask[:, :num_rows].masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask[:, None].to(self._packing.device)

    def _mask_of_padding(self, tiles: list[Tile], width: int) -> torch.Tensor | None:
        """−inf after the last key of a tile; None if no tile has padding."""
        lengths = np.array([tile.num_keys for tile in tiles])
        hidden = np.arange(width)[None] >= lengths[:, None]
        if not hidden.any():
            return None
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return mask[:, None, None].to(self._packing.device)

    def _index(self, rows: npt.NDArray[np.int64]) -> torch.Tensor | None:
        return None if np.array_equal(rows, self._all_rows) else self._to_device(rows)

    def _to_device(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._packing.device)


def _span_bounds(tiles: list[Tile]) -> Iterator[tuple[int, int]]:
    """Ranges of a batch's rows without duplicates."""
    num_rows = tiles[0].num_rows
    if tiles[0].kind not in (TileKind.SHARED, TileKind.STEADY, TileKind.CROSS):
        yield 0, len(tiles) * num_rows
        return
    first = 0
    for _, members in groupby(tiles, key=lambda tile: tile.first):
        end = first + len(list(members)) * num_rows
        yield first, end
        first = end


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
