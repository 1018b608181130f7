"""The torch backend's metadata of one step: which packed rows attend to which slots, in a few large batches."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from .packing import Packing
from .shared_prefix import SharedPrefix, find_shared_prefixes

_MAX_PADDING_SHARE = 0.5
"""A batch takes no part that would be padded to more than this share of the batch's longest part."""


class PrefixBatch(NamedTuple):
    """Rows that all see all of the same keys."""

    rows: torch.Tensor | None
    """[N] packed rows; None: all rows in their order."""
    kv_slots: torch.Tensor
    """[S] slots."""


class TailBatch(NamedTuple):
    """Parts with equally many new tokens, each with keys of its own."""

    rows: torch.Tensor | None
    """[B · T] packed rows, part after part; None: all rows in their order."""
    num_parts: int
    query_len: int
    kv_slots: torch.Tensor
    """[B · S] slots, each part padded to S with slot 0 of the null block."""
    mask: torch.Tensor | None
    """[B, 1, T, S] additive, in the KV's dtype; None: no mask is needed, but see causal."""
    causal: bool
    """One part from position 0: query t sees keys 0 … t."""


class View(NamedTuple):
    """The step as layers with one window see it. Each row is in exactly one tail and in at most one prefix."""

    prefixes: list[PrefixBatch]
    tails: list[TailBatch]


def build_view(packing: Packing, window: int | None, dtype: torch.dtype, min_shared_tokens: int) -> View:
    """Batches of all parts under one sliding window (None: full attention)."""
    prefixes: list[SharedPrefix] = []
    if window is None:
        prefixes = find_shared_prefixes(packing.tables, packing.starts, packing.block_size, min_shared_tokens)
    # Positions that the part's tail begins at: behind the shared prefix, or where the first query's window begins.
    firsts = [0 if window is None else max(0, start + 1 - window) for start in packing.starts]
    for prefix in prefixes:
        for part in prefix.parts:
            firsts[part] = prefix.num_blocks * packing.block_size
    return View(
        prefixes=[_prefix_batch(packing, prefix) for prefix in prefixes],
        tails=[_tail_batch(packing, parts, firsts, window, dtype) for parts in _tail_groups(packing, firsts)],
    )


def _prefix_batch(packing: Packing, prefix: SharedPrefix) -> PrefixBatch:
    slots = packing.slots(prefix.parts[0], 0, prefix.num_blocks * packing.block_size)
    return PrefixBatch(_rows(packing, prefix.parts), _to_device(slots, packing))


def _tail_groups(packing: Packing, firsts: list[int]) -> list[list[int]]:
    """Parts of equal query length together, cut where padding to the longest would waste too much."""
    lengths = [end - first for end, first in zip(packing.context_lens, firsts, strict=True)]
    order = sorted(range(len(lengths)), key=lambda part: (packing.query_lens[part], -lengths[part], part))
    groups: list[list[int]] = []
    for _, members in groupby(order, key=lambda part: packing.query_lens[part]):
        current: list[int] = []
        for part in members:
            if current and lengths[part] < _MAX_PADDING_SHARE * lengths[current[0]]:
                groups.append(sorted(current))
                current = []
            current.append(part)
        groups.append(sorted(current))
    return groups


def _tail_batch(
    packing: Packing, parts: list[int], firsts: list[int], window: int | None, dtype: torch.dtype
) -> TailBatch:
    query_len = packing.query_lens[parts[0]]
    ends = packing.context_lens
    width = max(ends[part] - firsts[part] for part in parts)
    slots = np.zeros((len(parts), width), dtype=np.int64)
    for row, part in enumerate(parts):
        slots[row, : ends[part] - firsts[part]] = packing.slots(part, firsts[part], ends[part])
    causal = len(parts) == 1 and query_len == width and (window is None or width <= window)
    return TailBatch(
        rows=_rows(packing, parts),
        num_parts=len(parts),
        query_len=query_len,
        kv_slots=_to_device(slots.reshape(-1), packing),
        mask=None if causal else _mask(packing, parts, firsts, width, window, dtype),
        causal=causal and query_len > 1,
    )


def _mask(
    packing: Packing, parts: list[int], firsts: list[int], width: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """[B, 1, T, S]: −inf where a query may not see a key; None if every query sees every key."""
    key = np.arange(width)[None, None, :] + np.array([firsts[part] for part in parts])[:, None, None]
    query_len = packing.query_lens[parts[0]]
    query = np.arange(query_len)[None, :, None] + np.array([packing.starts[part] for part in parts])[:, None, None]
    # Padding lies behind the last key of its part, so the causal rule hides it too.
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    if not hidden.any():
        return None
    mask = torch.zeros(hidden.shape, dtype=dtype)
    mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
    return mask[:, None].to(packing.device)


def _rows(packing: Packing, parts: list[int]) -> torch.Tensor | None:
    if len(parts) == len(packing.starts):
        return None
    ranges = [np.arange(packing.offsets[p], packing.offsets[p] + packing.query_lens[p]) for p in parts]
    return _to_device(np.concatenate(ranges), packing)


def _to_device(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], packing: Packing) -> torch.Tensor:
    return torch.from_numpy(array).to(packing.device)
