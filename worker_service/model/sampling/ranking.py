"""The most likely tokens of many rows at once, with a unique result even for equal logits.

For logits in the host's memory this is computed in numpy: a tensor operation would cost more than the work on a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LOW_BITS = 32
_LARGEST_ID = (1 << _LOW_BITS) - 1
_SIGN_BITS = 31
_MAGNITUDE = 0x7FFFFFFF
_NO_TOKEN = int(np.float32("-inf").view(np.int32) ^ _MAGNITUDE) << _LOW_BITS
"""The key of a logit of −inf with an id that is larger than all."""
_CHUNKS_PER_RESULT = 2
"""Chunks of a row per token wanted. With more, more maxima are ranked, and fewer other tokens are above the threshold."""
_MIN_CHUNKS = 512
"""Fewer chunks would be longer ones: no fewer numbers, and more tokens above the threshold."""
_LEAST_CHUNK = 16
"""Smaller chunks save nothing: a large share of the tokens is wanted."""
_SHORT = 128
"""Rows of so few tokens are sorted together."""
_MAX_KEYS = 1 << 16
"""Keys of several rows that are sorted at once: 512 KiB."""


def best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [N, count] of the largest logits [N, vocab_size], float32 without NaN: largest first, of equal ones the lowest id first.
    count ≤ vocab_size."""
    if logits.device.type == "cpu":
        return torch.from_numpy(best_on_host(logits.contiguous().numpy(), count))
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
    rank = (logits + 0.0).view(torch.int32)  # see _keys
    rank ^= (rank >> _SIGN_BITS) & _MAGNITUDE
    keys = torch.add(_LARGEST_ID - ids, rank, alpha=1 << _LOW_BITS)
    largest = torch.topk(keys, count, dim=-1).values
    return _LARGEST_ID - (largest & _LARGEST_ID)


def most_likely(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row [N, vocab_size], and its id, the lowest of equal ones. NaN if one is NaN, with any id."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # ten times faster in numpy
        array = logits.numpy()
        ids: list[int] = array.argmax(axis=-1).tolist()
        return [array.item(row, token_id) for row, token_id in enumerate(ids)], ids
    largest, tokens = torch.max(logits, dim=-1)
    return largest.tolist(), tokens.tolist()


# -- on the host


class Ranked(NamedTuple):
    """Tokens of N rows, most likely first, of equally likely ones the lowest id first."""

    ids: Ints
    """[N, M]; above the vocabulary after a row's last token."""
    logits: Floats
    """[N, M], −0.0 as 0.0; −inf after a row's last token."""


def thresholds(logits: Floats, rows: Ints, counts: Ints) -> Floats:
    """A threshold for each of the rows [N] of the logits [·, vocab_size]: at least counts [N] of the row's logits are not below it,
    and not many more. −inf if most tokens are wanted."""
    vocab_size = logits.shape[1]
    num_needed = _CHUNKS_PER_RESULT * int(counts.max())
    num_chunks = min(max(num_needed, _MIN_CHUNKS), vocab_size // _LEAST_CHUNK)
    if num_chunks < num_needed:
        return np.full(len(rows), -np.inf, dtype=np.float32)
    # A chunk is every num_chunks-th token: so the maxima are computed in vectors. The last few tokens are in no chunk.
    end = vocab_size // num_chunks * num_chunks
    maxima = np.empty((len(rows), num_chunks), dtype=np.float32)
    for row, of_row in zip(rows.tolist(), maxima, strict=True):
        np.maximum.reduce(logits[row, :end].reshape(-1, num_chunks), axis=0, out=of_row)
    maxima.sort(axis=1)
    result: Floats = maxima[np.arange(len(rows)), num_chunks - counts]
    return result


def ranked(logits: Floats, rows: Ints, least: Floats) -> Iterator[tuple[Ints, Ranked]]:
    """The tokens of rows [N] of the logits [·, vocab_size] that are not below least [N], in groups of rows with about as many
    tokens: indices in `rows`, and their tokens. The logits have no NaN, and each row has such a token."""
    is_above = np.empty(logits.shape[1], dtype=np.bool_)
    ids, values = [], []
    for row, least_of_row in zip(rows.tolist(), least, strict=True):
        np.greater_equal(logits[row], least_of_row, out=is_above)
        ids.append(is_above.nonzero()[0])
        values.append(logits[row, ids[-1]])
    keys = _keys(np.concatenate(values), np.concatenate(ids))
    ends = np.cumsum([len(of_row) for of_row in ids])
    lengths = np.diff(ends, prepend=0)
    for group in _groups(lengths):
        of_group = lengths[group]
        width = int(of_group.max())
        table = np.full((len(group), width), _NO_TOKEN, dtype=np.int64)
        table[np.arange(width) < of_group[:, None]] = np.concatenate(
            [keys[ends[index] - lengths[index] : ends[index]] for index in group]
        )
        table.sort(axis=1)
        yield group, _decoded(table[:, ::-1])


def best_on_host(logits: Floats, count: int) -> Ints:
    """`best` in numpy."""
    ids = np.empty((len(logits), count), dtype=np.int64)
    every_row = np.arange(len(logits))
    for rows, tokens in ranked(logits, every_row, thresholds(logits, every_row, np.full(len(logits), count))):
        ids[rows] = tokens.ids[:, :count]
    return ids


def _keys(logits: Floats, ids: Ints) -> Ints:
    """Distinct numbers in the order of the tokens; the most likely one has the largest."""
    # A number's bits, read as an integer, grow with it if it is positive and shrink if it is negative. −0.0 + 0.0 is 0.0.
    rank = (logits + np.float32(0)).view(np.int32)
    rank ^= (rank >> _SIGN_BITS) & _MAGNITUDE
    return (rank.astype(np.int64) << _LOW_BITS) + (_LARGEST_ID - ids)


def _decoded(keys: Ints) -> Ranked:
    rank = (keys >> _LOW_BITS).astype(np.int32)
    rank ^= (rank >> _SIGN_BITS) & _MAGNITUDE
    return Ranked(_LARGEST_ID - (keys & _LARGEST_ID), rank.view(np.float32))


def _groups(lengths: Ints) -> Iterator[Ints]:
    """Rows for one table, ascending: others are as long, and all have _MAX_KEYS at most, or it is a single one."""
    by_length = np.argsort(lengths, kind="stable")
    first, limit = 0, 0
    for end, length in enumerate(lengths[by_length].tolist()):
        if end > first and (length > limit or length * (end + 1 - first) > _MAX_KEYS):
            yield np.sort(by_length[first:end])
            first = end
        if end == first:
            limit = max(_SHORT, 2 * length)
    yield np.sort(by_length[first:])
