"""The most likely tokens of many rows at once, with a unique result even for equal logits."""

from __future__ import annotations

import torch

_LOW_BITS = 32


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [N, count] of the largest logits [N, vocab_size], float32 without NaN: largest first, of equal ones the lowest id first.
    count ≤ vocab_size."""
    vocab_size = logits.shape[1]
    # A number's bits, read as an integer, grow with it if it is positive and shrink if it is negative. −0.0 + 0.0 is 0.0.
    rank = (logits + 0.0).view(torch.int32)
    rank ^= (rank >> 31) & 0x7FFFFFFF
    lowest_first = torch.arange(vocab_size - 1, -1, -1, device=logits.device)
    # The keys of a row are distinct, so the order is unique.
    keys = torch.add(lowest_first, rank, alpha=1 << _LOW_BITS)
    largest = torch.topk(keys, count, dim=-1).values
    return vocab_size - 1 - (largest & ((1 << _LOW_BITS) - 1))
