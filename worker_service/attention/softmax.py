"""Softmax attention over gathered keys, with the log-sum-exp for merging partial results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch


class PartialAttention(NamedTuple):
    """Attention over some of a query's keys."""

    out: torch.Tensor
    """[B, Hq, T, Dv]."""
    lse: torch.Tensor | None
    """[B, Hq, T] float32: natural log of the sum of exp(score) over these keys; None if not requested."""


class KeyRange(NamedTuple):
    """Gathered keys and values, and their visibility to queries."""

    key: torch.Tensor
    """[B, Hkv, S, Dk]."""
    value: torch.Tensor
    """[B, Hkv, S, Dv]."""
    mask: torch.Tensor | None = None
    """[B, 1, T, S], 0 or −inf, added to the scores; None: no mask."""
    causal: bool = False
    """Whether query t sees only keys 0 … t; needs T = S and no mask."""


def attend(
    query: torch.Tensor, keys: KeyRange, scaling: float, softcap: float | None = None, *, need_lse: bool = True
) -> PartialAttention:
    """query [B, Hq, T, Dk], Hq a multiple of Hkv. Every query must see at least one key."""
    if softcap is not None:
        return attend_plainly(query, keys, scaling, softcap)
    if query.device.type == "cpu" and fused_cpu_attention_works():
        return _fused_cpu(query, keys, scaling)
    # On a CPU, torch's function computes a row in ways that depend on the number of rows.
    if need_lse or query.device.type == "cpu":
        return attend_plainly(query, keys, scaling)
    return attend_publicly(query, keys, scaling)


def _fused_cpu(query: torch.Tensor, keys: KeyRange, scaling: float) -> PartialAttention:
    key, value = keys.key, keys.value
    k_dim, v_dim = key.shape[-1], value.shape[-1]
    if k_dim != v_dim:  # the kernel has one head size; zeros change neither scores nor values
        wide = max(k_dim, v_dim)
        query, key = (torch.nn.functional.pad(tensor, (0, wide - k_dim)) for tensor in (query, key))
        value = torch.nn.functional.pad(value, (0, wide - v_dim))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, keys.causal, attn_mask=keys.mask, scale=scaling
    )
    return PartialAttention(out[..., :v_dim], lse)


def attend_publicly(query: torch.Tensor, keys: KeyRange, scaling: float) -> PartialAttention:
    """Attend with torch's public function, which selects a kernel for the device but does not return the log-sum-exp."""
    groups = query.shape[1] // keys.key.shape[1]
    # Repeated here: with a mask and grouped heads torch selects no fused CUDA kernel, and stores the scores.
    key, value = keys.key.repeat_interleave(groups, dim=1), keys.value.repeat_interleave(groups, dim=1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=keys.mask, is_causal=keys.causal, scale=scaling
    )
    return PartialAttention(out, None)


def attend_plainly(
    query: torch.Tensor, keys: KeyRange, scaling: float, softcap: float | None = None
) -> PartialAttention:
    """Attend with matrix products in float32, for all arguments and devices; stores all scores."""
    batch, heads, length, _ = query.shape
    kv_heads, num_keys = keys.key.shape[1], keys.key.shape[2]
    scores = _scores(query, keys, scaling, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).view(batch, kv_heads, -1, num_keys)
    out = torch.matmul(weights, keys.value.float())
    return PartialAttention(out.view(batch, heads, length, -1).to(query.dtype), lse)


def _scores(
    query: torch.Tensor,
    keys: KeyRange,
    scaling: float,
    softcap: float | None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """Scores [B, Hq, T, S] in float32 of all queries and keys, with −inf where a query does not see a key."""
    batch, heads, length, dim = query.shape
    kv_heads, num_keys = keys.key.shape[1], keys.key.shape[2]
    # The query heads of one KV head are adjacent, so K and V need no repetition.
    grouped = query.float().reshape(batch, kv_heads, -1, dim)
    scores = product(grouped, keys.key.float().transpose(-1, -2)) * scaling
    scores = scores.view(batch, heads, length, num_keys)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if keys.mask is not None:
        scores = scores + keys.mask
    if keys.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


@cache
def fused_cpu_attention_works() -> bool:
    """Whether this torch's fused CPU kernel exists, supports grouped heads and a mask, and returns the log-sum-exp.

    Its name is private, because the public function does not return the log-sum-exp; so it is tried once.
    """
    if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return False
    numbers = torch.linspace(-1, 1, 4 * 2 * 8)
    query = numbers.view(1, 4, 2, 8)
    key = numbers[:48].view(1, 2, 3, 8)
    keys = KeyRange(key, key.flip(-1), mask=torch.tensor([[[[0, 0, float("-inf")], [0, 0, 0]]]]))
    try:
        fused = _fused_cpu(query, keys, scaling=0.5)
    except (RuntimeError, TypeError):
        return False
    plain = attend_plainly(query, keys, scaling=0.5)
    assert fused.lse is not None
    assert plain.lse is not None
    return torch.allclose(fused.out, plain.out, atol=1e-5) and torch.allclose(fused.lse, plain.lse, atol=1e-5)


def attend_in_fixed_order(
    query: torch.Tensor, keys: KeyRange, scaling: float, softcap: float | None = None
) -> PartialAttention:
    """Attend as `attend` does, with the log-sum-exp, for a CPU whose matrix products sum in other orders. It is many times
    slower. Products and sums of two numbers are rounded the same at every place of a tensor, so each row has the same bits in
    every tensor.

    query [B, Hq, T, Dk], Hq a multiple of Hkv. Every query must see at least one
    key.

    Keys that a query does not see, and their number, change no bit of its result.
    """
    batch, heads, length, _ = query.shape
    kv_heads, num_keys = keys.key.shape[1], keys.key.shape[2]
    scores = _scores(query, keys, scaling, softcap, product=matmul_in_fixed_order)
    peak = scores.amax(dim=-1, keepdim=True)  # a maximum has no rounding
    weights = torch.exp(scores - peak).view(batch, kv_heads, -1, num_keys)
    # The sum of the weights is one more column, so it has the same order.
    value = torch.nn.functional.pad(keys.value.float(), (0, 1), value=1.0)
    sums = matmul_in_fixed_order(weights, value).view(batch, heads, length, -1)
    out, total = sums[..., :-1] / sums[..., -1:], sums[..., -1]
    return PartialAttention(out.to(query.dtype), peak[..., 0] + torch.log(total))


def matmul_in_fixed_order(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [..., M, K] · right [..., K, N], each sum term by term from k = 0 upwards; trailing zeros change no bit."""
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for k in range(left.shape[-1]):
        # Not addcmul: it may round once at some places of a tensor and twice at others.
        total += left[..., k, None] * right[..., k, None, :]
    return total
