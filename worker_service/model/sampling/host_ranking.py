"""`ranking` in numpy, for logits in the host's memory: a tensor operation would cost more than the work on a few hundred tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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


def best(logits: Floats, count: int) -> Ints:
    """The ids [N, count] of the most likely tokens, as `ranking.best` returns them."""
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
