"""Kernels over block tables in plain loops, with the signatures and rules of those that run on GPUs only."""

from __future__ import annotations

import torch


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """As flash-attn 2.8: the last query sees the last key; window_size counts keys to the left and right of a query."""
    assert block_table is not None
    assert block_table.dtype == cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.is_contiguous()
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
    left, right = window_size
    if causal:
        right = 0
    return _paged(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale, left, right, softcap)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """As torch 2.13 over FlashAttention 3."""
    assert cu_seq_k is None, "not together with a block table"
    assert block_table is not None
    assert seqused_k is not None
    assert block_table.dtype == seqused_k.dtype == cu_seq_q.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert int(cu_seq_q.diff().max()) == max_q
    assert int(seqused_k.max()) == max_k
    return _paged(query, key, value, cu_seq_q, seqused_k, block_table, scale, *window_size, 0.0)


def _paged(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_ends: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float | None,
    left: int,
    right: int,
    softcap: float,
) -> torch.Tensor:
    out = torch.empty(*query.shape[:2], v_cache.shape[-1], dtype=query.dtype)
    groups = query.shape[1] // k_cache.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for part, context in enumerate(context_lens.tolist()):
        first, end = query_ends[part : part + 2].tolist()
        blocks = block_tables[part, : -(-context // k_cache.shape[1])].long()
        key = k_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(groups, dim=1)
        value = v_cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(context)[None] - (torch.arange(end - first) + context - (end - first))[:, None]
        if left >= 0:
            scores = scores.masked_fill(distance < -left, float("-inf"))
        if right >= 0:
            scores = scores.masked_fill(distance > right, float("-inf"))
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
    return out
