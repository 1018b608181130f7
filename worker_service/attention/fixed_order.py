"""Softmax attention that sums in a fixed order, for a CPU whose matrix products do not.

It is many times slower than a matrix product, because it consists of elementwise operations. Products and sums of two numbers are
rounded the same at every place of a tensor, so each row has the same bits in every tensor.
"""

from __future__ import annotations

import torch

from .softmax import KeyRange, PartialAttention, hide, scores_of


def attend_in_fixed_order(
    query: torch.Tensor, keys: KeyRange, scaling: float, softcap: float | None = None
) -> PartialAttention:
    """Attend as `attend` does, with the log-sum-exp. query [B, Hq, T, Dk], Hq a multiple of Hkv. Every query must see at least one
    key.

    Keys that a query does not see, and their number, change no bit of its result.
    """
    batch, heads, length, _ = query.shape
    kv_heads, num_keys = keys.key.shape[1], keys.key.shape[2]
    scores = hide(scores_of(query, keys, scaling, softcap, product=matmul_in_fixed_order), keys)
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
