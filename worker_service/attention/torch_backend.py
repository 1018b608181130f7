"""The attention backend in plain torch: runs on any device, gathers KV by slot, attends in batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from .layer import AttentionCall, KVLayer
from .packing import Packing
from .softmax import KeyRange, PartialAttention, attend, attend_in_fixed_order
from .torch_plan import PlanShapes, Sight, TileBatch, View, build_view


class AttentionPiece(NamedTuple):
    """Attention of some rows of a step over one segment each."""

    rows: torch.Tensor | None
    """[N] distinct rows; None: all rows in order."""
    attended: PartialAttention
    is_first: bool
    """Whether no earlier piece has any of these rows."""


class _Running(NamedTuple):
    """Attention over the segments so far: out = sum / weight, and exp(peak) · weight is the sum of exp(score)."""

    sum: torch.Tensor
    """[ΣT, Hq, Dv], in float32 once there is more than one segment."""
    peak: torch.Tensor
    """[ΣT, Hq] float32."""
    weight: torch.Tensor | None
    """[ΣT, Hq] float32; None: 1 everywhere, as after the first segment."""


def join(pieces: Iterable[AttentionPiece], num_rows: int) -> torch.Tensor:
    """The outputs of pieces without common rows, [ΣT, Hq, Dv]. Every row must be in one piece."""
    joined: torch.Tensor | None = None
    for rows, attended, _ in pieces:
        if rows is None:
            return attended.out
        if joined is None:
            joined = attended.out.new_empty(num_rows, *attended.out.shape[1:])
        joined.index_copy_(0, rows, attended.out)
    assert joined is not None, "a step has rows"
    return joined


def merge(pieces: Iterable[AttentionPiece], num_rows: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Attention over the union of each row's segments, [ΣT, Hq, Dv] in float32; every piece has a log-sum-exp.

    Online softmax, as in FlashAttention, in the order of the pieces. exp is the only operation that is not rounded exactly, and
    torch computes it the same at every place of a tensor, unlike logaddexp and sigmoid. sinks: [Hq] logits without a value.
    """
    running: _Running | None = None
    for piece in pieces:
        running = _add(running, piece, num_rows)
    assert running is not None, "a step has rows"
    weight = running.weight
    if sinks is not None:
        share = torch.exp(sinks.float() - running.peak)
        weight = share.add_(1) if weight is None else share.add_(weight)
    return running.sum if weight is None else running.sum / weight[..., None]


def _add(running: _Running | None, piece: AttentionPiece, num_rows: int) -> _Running:
    rows, (out, lse), is_first = piece
    assert lse is not None, "computed if there is more than one segment"
    if rows is None:
        return _Running(out, lse, None) if running is None else _more(running, out, lse)
    if running is None:
        running = _nothing(num_rows, out, lse)
    weight = torch.ones_like(running.peak) if running.weight is None else running.weight
    whole = (running.sum.float(), running.peak, weight)
    if is_first:
        some = _Running(out.float(), lse, torch.ones_like(lse))
    else:
        some = _more(_Running(*(tensor.index_select(0, rows) for tensor in whole)), out, lse)
    assert some.weight is not None, "set above, or by _more"
    for tensor, values in zip(whole, (some.sum, some.peak, some.weight), strict=True):
        tensor.index_copy_(0, rows, values)
    return _Running(*whole)


def _more(running: _Running, out: torch.Tensor, lse: torch.Tensor) -> _Running:
    """The state after one more segment."""
    peak = torch.maximum(running.peak, lse)
    before, now = (running.peak - peak).exp_(), (lse - peak).exp_()
    total = (running.sum * before[..., None]).add_(out * now[..., None])
    return _Running(total, peak, before.add_(now) if running.weight is None else (running.weight * before).add_(now))


def _nothing(num_rows: int, out: torch.Tensor, lse: torch.Tensor) -> _Running:
    """Rows without keys: adding the first segment gives that segment, bit by bit."""
    shape = (num_rows, *lse.shape[1:])
    lowest = torch.finfo(torch.float32).min
    return _Running(
        torch.zeros(*shape, out.shape[-1], device=out.device),
        torch.full(shape, lowest, device=out.device),
        torch.zeros(shape, device=out.device),
    )


MIN_SHARED_TOKENS = 1024
"""KV reads per layer that a shared prefix must save to pay for its extra calls."""
NEVER_SHARE = 1 << 62
"""A min_shared_tokens that no prefix reaches: the blocks of every sequence are gathered."""
FREE_SHAPES = PlanShapes(partition=None, row_multiple=1, key_multiple=1)
"""Shapes for as few calls and as little padding as possible."""


class TorchAttention:
    """Gather + softmax attention; blocks that several sequences share are read and attended once for all of them.

    The shared part has no causal mask; its result is merged with each sequence's own part by log-sum-exp (cascade
    attention, as in Hydragen and FlashInfer).

    With shapes that hold on this machine (found by invariance.py) it is batch-invariant in float32 on a CPU: the bits of a row
    depend on its own query and the keys that it sees, not on other rows of the step, on how much of its sequence is in the step,
    or on which sequences share its blocks. For this, each row's keys are cut at fixed positions, and kernels are called with
    shapes that do not change the order of their sums.
    """

    def __init__(
        self, dtype: torch.dtype, min_shared_tokens: int = MIN_SHARED_TOKENS, shapes: PlanShapes = FREE_SHAPES
    ) -> None:
        """shapes: of kernel calls; FREE_SHAPES are the fastest, and not batch-invariant."""
        self._dtype = dtype
        self._min_shared_tokens = min_shared_tokens
        self.shapes = shapes
        self._packing: Packing | None = None
        self._views: dict[Sight, View] = {}
        self._bias: _Bias | None = None

    def begin(self, packing: Packing) -> None:
        self._packing = packing
        self._views = {}
        self._bias = None

    def attend(
        self, layer: KVLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        packing = self._packing
        assert packing is not None, "attend before begin"
        if not layer.is_cross:
            layer.write(packing.groups[layer.group].slot_mapping, key, value)
        # A model has few different windows; the first layer with a window builds its view.
        sight = Sight(layer.group, layer.window, layer.is_cross, layer.distance_bias is not None)
        view = self._views.get(sight)
        if view is None:
            view = self._views[sight] = build_view(packing, sight, self._dtype, self._min_shared_tokens, self.shapes)
        masks = None if layer.distance_bias is None else self._masks_of_bias(view, layer.distance_bias)
        out = _attend_view(view, query[0].transpose(0, 1), *layer.rows(), call, masks)
        # Contiguous, because some models take a view of it.
        return out.to(query.dtype)[None].contiguous()

    def _masks_of_bias(self, view: View, table: torch.Tensor) -> list[torch.Tensor]:
        """The bias of each batch's scores [B, Hq, T', S], −inf for keys that are not seen. The tensors of the last layer are kept:
        in most models all layers have one table."""
        bias = self._bias
        if bias is None or bias.view is not view or bias.table is not table:
            # Distance −1 is the last column.
            hidden = torch.nn.functional.pad(table.to(self._dtype), (0, 1), value=float("-inf"))
            masks = [hidden[:, batch.distances].transpose(0, 1).contiguous() for batch in view.batches]
            bias = self._bias = _Bias(view, table, masks)
        return bias.masks


class _Bias(NamedTuple):
    """The bias of a view's scores."""

    view: View
    table: torch.Tensor
    masks: list[torch.Tensor]


def _attend_view(
    view: View,
    query: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    call: AttentionCall,
    masks: Sequence[torch.Tensor] | None,
) -> torch.Tensor:
    """query [ΣT, Hq, Dk] → [ΣT, Hq, Dv]. masks: those of the batches, with a bias."""
    need_lse = view.merges or call.sinks is not None
    pieces = (
        AttentionPiece(span.rows, _slice(attended, span.first, span.end), span.is_first)
        for batch, mask in zip(view.batches, repeat(None) if masks is None else masks, strict=masks is not None)
        for attended in (_attend_batch(batch, query, k_rows, v_rows, call, view.shapes, need_lse, mask),)
        for span in batch.spans
    )
    if not need_lse:
        return join(pieces, query.shape[0])
    return merge(pieces, query.shape[0], call.sinks)


def _attend_batch(
    batch: TileBatch,
    query: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    call: AttentionCall,
    shapes: PlanShapes,
    need_lse: bool,
    biased_mask: torch.Tensor | None,
) -> PartialAttention:
    """query [ΣT, Hq, Dk] → out [B · T, Hq, Dv], lse [B · T, Hq]. biased_mask: [B, Hq, T', S] instead of the batch's."""
    selected = query if batch.rows is None else query.index_select(0, batch.rows)
    num_tiles, num_rows = batch.num_tiles, batch.num_rows
    heads, dim, kv_heads = selected.shape[1], selected.shape[2], k_rows.shape[1]
    tiles = selected.view(num_tiles, num_rows, kv_heads, heads // kv_heads, dim)
    # If all rows see the same keys, the query heads of one KV head become its rows: K and V are read once for all of them.
    mask = batch.mask if biased_mask is None else biased_mask
    sees_alike = not batch.causal if mask is None else mask.shape[2] == 1
    folds = sees_alike and biased_mask is None
    tiles = tiles.permute(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads if folds else heads, -1, dim)
    length = tiles.shape[2]
    padding = -length % shapes.row_multiple
    if padding:
        tiles = torch.nn.functional.pad(tiles, (0, 0, 0, padding))
    if mask is not None and folds:
        mask = mask.expand(-1, -1, length + padding, -1)
    key = k_rows.index_select(0, batch.kv_slots).view(num_tiles, -1, *k_rows.shape[1:])
    value = v_rows.index_select(0, batch.kv_slots).view(num_tiles, -1, *v_rows.shape[1:])
    v_dim = value.shape[-1]
    if v_dim % shapes.value_multiple:
        value = torch.nn.functional.pad(value, (0, -v_dim % shapes.value_multiple))
    keys = KeyRange(key.transpose(1, 2), value.transpose(1, 2), mask, batch.causal)
    if shapes.own_sums:
        out, lse = attend_in_fixed_order(tiles, keys, call.scaling, call.softcap)
    else:
        out, lse = attend(tiles, keys, call.scaling, call.softcap, need_lse=need_lse)
    out, lse = out[:, :, :length, :v_dim], None if lse is None else lse[:, :, :length]
    if folds:
        split = (num_tiles, kv_heads, heads // kv_heads, num_rows)
        out = out.reshape(*split, -1).permute(0, 3, 1, 2, 4)
        lse = None if lse is None else lse.reshape(split).permute(0, 3, 1, 2)
    else:
        out, lse = out.transpose(1, 2), None if lse is None else lse.transpose(1, 2)
    out = out.reshape(num_tiles * num_rows, heads, -1)
    return PartialAttention(out, None if lse is None else lse.reshape(num_tiles * num_rows, heads))


def _slice(attended: PartialAttention, first: int, end: int) -> PartialAttention:
    out, lse = attended
    if end - first == out.shape[0]:
        return attended
    return PartialAttention(out[first:end], None if lse is None else lse[first:end])
