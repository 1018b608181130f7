"""The attention backend in plain torch: runs on any device, gathers KV by slot, attends in batches."""

from __future__ import annotations

import torch

from .layer import AttentionCall, KVLayer
from .packing import Packing
from .softmax import Attended, Keys, attend, merge, with_sinks
from .torch_plan import PrefixBatch, TailBatch, View, build_view

MIN_SHARED_TOKENS = 1024
"""KV reads per layer that attending once must save before the extra calls of a shared prefix pay for themselves."""
NEVER_SHARE = 1 << 62
"""As min_shared_tokens: gather the blocks of every sequence."""


class TorchAttention:
    """Gather + softmax attention; blocks that several sequences share are read and attended once for all of them.

    The shared part has no causal mask; its result is merged with each sequence's own part by log-sum-exp (cascade
    attention, as in Hydragen and FlashInfer).
    """

    def __init__(self, dtype: torch.dtype, min_shared_tokens: int = MIN_SHARED_TOKENS) -> None:
        self._dtype = dtype
        self._min_shared_tokens = min_shared_tokens
        self._packing: Packing | None = None
        self._views: dict[int | None, View] = {}

    def begin(self, packing: Packing) -> None:
        self._packing = packing
        self._views = {}

    def attend(
        self,
        layer: KVLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        packing = self._packing
        assert packing is not None, "attend before begin"
        k_rows = layer.k_cache.view(-1, *layer.k_cache.shape[2:])
        v_rows = layer.v_cache.view(-1, *layer.v_cache.shape[2:])
        k_rows.index_copy_(0, packing.slot_mapping, key[0].transpose(0, 1))
        v_rows.index_copy_(0, packing.slot_mapping, value[0].transpose(0, 1))
        # Layers come with very few different windows; the view of each is made by the first layer that has it.
        view = self._views.get(layer.window)
        if view is None:
            view = self._views[layer.window] = build_view(packing, layer.window, self._dtype, self._min_shared_tokens)
        attended = _attend_view(view, query[0], k_rows, v_rows, call)
        out = attended.out if call.sinks is None else with_sinks(attended, call.sinks)
        # Contiguous, because some models take a view of it; the fused kernel's output mostly is.
        return out.to(query.dtype).transpose(1, 2).contiguous()


def _attend_view(
    view: View, query: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, call: AttentionCall
) -> Attended:
    """query [Hq, ΣT, Dk] → out [1, Hq, ΣT, Dv]."""
    need_lse = bool(view.prefixes) or call.sinks is not None
    own = _collect(
        [
            (tail.rows, _attend_tail(tail, _select(query, tail.rows), k_rows, v_rows, call, need_lse))
            for tail in view.tails
        ],
        query,
    )
    if not view.prefixes:
        return own
    shared = _collect(
        [(p.rows, _attend_prefix(p, _select(query, p.rows), k_rows, v_rows, call)) for p in view.prefixes], query
    )
    return merge(shared, own)


def _attend_prefix(
    batch: PrefixBatch, query: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor, call: AttentionCall
) -> Attended:
    """query [Hq, N, Dk] → out [1, Hq, N, Dv]. All rows see all keys, so the heads of a KV head fold into the rows."""
    heads, num_rows, dim = query.shape
    kv_heads = k_rows.shape[1]
    folded = query.reshape(1, kv_heads, heads // kv_heads * num_rows, dim)
    out, lse = attend(folded, _gather(k_rows, v_rows, batch.kv_slots, 1), call.scaling, call.softcap)
    assert lse is not None, "needed for the merge"
    return Attended(out.reshape(1, heads, num_rows, -1), lse.reshape(1, heads, num_rows))


def _attend_tail(
    batch: TailBatch,
    query: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    call: AttentionCall,
    need_lse: bool,
) -> Attended:
    """query [Hq, B · T, Dk] → out [1, Hq, B · T, Dv]."""
    heads, num_rows, dim = query.shape
    kv_heads = k_rows.shape[1]
    keys = _gather(k_rows, v_rows, batch.kv_slots, batch.num_parts)
    keys = keys._replace(mask=batch.mask, causal=batch.causal)
    parts = query.view(heads, batch.num_parts, batch.query_len, dim).transpose(0, 1)
    if batch.query_len == 1:
        # The query heads of one KV head become its queries: K and V are read once for all of them.
        parts = parts.reshape(batch.num_parts, kv_heads, heads // kv_heads, dim)
        if batch.mask is not None:
            keys = keys._replace(mask=batch.mask.expand(-1, -1, heads // kv_heads, -1))
    out, lse = attend(parts, keys, call.scaling, call.softcap, need_lse=need_lse)
    out = out.reshape(batch.num_parts, heads, batch.query_len, -1).transpose(0, 1)
    if lse is not None:
        lse = lse.reshape(batch.num_parts, heads, batch.query_len).transpose(0, 1).reshape(1, heads, num_rows)
    return Attended(out.reshape(1, heads, num_rows, -1), lse)


def _gather(k_rows: torch.Tensor, v_rows: torch.Tensor, slots: torch.Tensor, num_parts: int) -> Keys:
    """K and V of the slots as [B, Hkv, S, D]."""
    key = k_rows.index_select(0, slots).view(num_parts, -1, *k_rows.shape[1:])
    value = v_rows.index_select(0, slots).view(num_parts, -1, *v_rows.shape[1:])
    return Keys(key.transpose(1, 2), value.transpose(1, 2))


def _select(query: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return query if rows is None else query.index_select(1, rows)


def _collect(pieces: list[tuple[torch.Tensor | None, Attended]], query: torch.Tensor) -> Attended:
    """Results of disjoint sets of rows in one tensor; rows in no set have weight 0 (lse −inf)."""
    if len(pieces) == 1 and pieces[0][0] is None:
        return pieces[0][1]
    heads, num_rows, _ = query.shape
    out = query.new_zeros(1, heads, num_rows, pieces[0][1].out.shape[-1])
    lse = torch.full((1, heads, num_rows), float("-inf"), device=query.device)
    for rows, attended in pieces:
        assert rows is not None, "one piece has all rows, so there is no other"
        out.index_copy_(2, rows, attended.out)
        if attended.lse is not None:
            lse.index_copy_(2, rows, attended.lse)
    return Attended(out, lse)
