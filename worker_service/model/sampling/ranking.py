"""The most likely tokens of many rows at once, with a unique result even for equal logits."""

from __future__ import annotations

import torch

from . import host_ranking

_LOW_BITS = 32
_CHUNKS_PER_RESULT = 2
"""Chunks of a row per token wanted. With more, more maxima are ranked, and fewer other tokens are above the threshold."""
_LEAST_CHUNK = 16
"""Smaller chunks save nothing: a large share of the tokens is wanted."""


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [N, count] of the largest logits [N, vocab_size], float32 without NaN: largest first, of equal ones the lowest id first.
    count ≤ vocab_size."""
    if logits.device.type == "cpu":
        return torch.from_numpy(host_ranking.best(logits.contiguous().numpy(), count))
    return best_on_device(logits, count)


def best_on_device(logits: torch.Tensor, count: int) -> torch.Tensor:
    """`best` in tensor operations, on any device."""
    num_rows, vocab_size = logits.shape
    chunk = vocab_size // (_CHUNKS_PER_RESULT * count)
    if chunk < _LEAST_CHUNK:
        ids = torch.arange(vocab_size, device=logits.device).expand(num_rows, -1)
        return _best_of(logits, ids, count)
    # At least `count` chunks have a maximum that is not below the threshold, so no wanted token is below it.
    maxima = logits.unfold(1, chunk, chunk).amax(dim=-1)  # the last vocab_size % chunk tokens are in no chunk
    threshold = maxima.topk(count, dim=-1).values[:, -1:]
    return _best_of(*_at_least(logits, threshold), count)


def _at_least(logits: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [N, M] that are not below the row's threshold [N, 1], and their ids. M is that of the row that has the most; the
    others are filled up with −inf and an id that is larger than all."""
    num_rows, vocab_size = logits.shape
    flat = (logits >= threshold).view(-1).nonzero()[:, 0]
    rows, ids = flat // vocab_size, flat % vocab_size
    lengths = rows.bincount(minlength=num_rows)
    places = torch.arange(len(rows), device=logits.device) - (lengths.cumsum(0) - lengths)[rows]
    width = int(lengths.max())
    padded = logits.new_full((num_rows, width), float("-inf"))
    padded[rows, places] = logits[rows, ids]
    padded_ids = ids.new_full((num_rows, width), vocab_size)
    padded_ids[rows, places] = ids
    return padded, padded_ids


def _best_of(logits: torch.Tensor, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`best` among some tokens of each row: logits and ids [N, M]."""
    # A number's bits, read as an integer, grow with it if it is positive and shrink if it is negative. −0.0 + 0.0 is 0.0.
    rank = (logits + 0.0).view(torch.int32)
    rank ^= (rank >> 31) & 0x7FFFFFFF
    # The keys of a row's tokens are distinct, so their order is unique.
    largest_id = (1 << _LOW_BITS) - 1
    keys = torch.add(largest_id - ids, rank, alpha=1 << _LOW_BITS)
    largest = torch.topk(keys, count, dim=-1).values
    return largest_id - (largest & largest_id)


def most_likely(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row [N, vocab_size], and its id, the lowest of equal ones. NaN if one is NaN, with any id."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # ten times faster in numpy
        array = logits.numpy()
        ids: list[int] = array.argmax(axis=-1).tolist()
        return [array.item(row, token_id) for row, token_id in enumerate(ids)], ids
    largest, tokens = torch.max(logits, dim=-1)
    return largest.tolist(), tokens.tolist()
