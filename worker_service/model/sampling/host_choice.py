"""`choice` in numpy, for logits in the host's memory: the same tokens for a small part of the work.

The exact choice sums the weights of all tokens of a row in one order, in float64. Here they are summed by blocks, first in float32,
and only the block or the tokens that can matter are computed exactly. The two sums differ by rounding, which has a bound. A row in
which a decision is nearer to equality than the bound is left to float64, and then to the exact choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...step import SamplingParams
from .ranking import Doubles, Floats, Ints, Ranked, ranked, thresholds

_Bools = npt.NDArray[np.bool_]

_BLOCK = 128
"""Tokens whose weights are summed at once."""
_SAMPLE = 512
"""Tokens of a row from which the weight of the unlikely ones is estimated."""
_GUARD = 1e-6
"""Relative rounding of a threshold, with a wide margin: float32 rounds by a tenth of it."""


class Chosen(NamedTuple):
    """The tokens of N rows."""

    tokens: Ints
    """[N]"""
    is_certain: _Bools
    """[N]: whether the exact choice has this token."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to choose for, with what the choice depends on besides the logits. All [N]."""

    index: Ints
    """Index of the row in `choose`'s arguments and result."""
    row: Ints
    """Index of the row in the logits."""
    number: Doubles
    largest: Doubles
    """The largest logit of the row."""
    temperature: Doubles
    top_k: Ints
    """vocab_size: all."""
    top_p: Doubles
    min_p: Doubles

    @classmethod
    def of(
        cls, logits: Floats, rows: Sequence[int], params: Sequence[SamplingParams], numbers: Sequence[float]
    ) -> _Rows:
        vocab_size = logits.shape[1]
        return cls(
            np.arange(len(rows)),
            np.array(rows),
            np.array(numbers),
            np.array([np.maximum.reduce(logits[row]) for row in rows], dtype=np.float64),
            np.array([sampling.temperature for sampling in params]),
            np.array([min(sampling.top_k or vocab_size, vocab_size) for sampling in params]),
            np.array([sampling.top_p for sampling in params]),
            np.array([sampling.min_p for sampling in params]),
        )

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, some: Ints | _Bools) -> _Rows:
        """Some of the rows: their indices in ascending order, or whether each is one."""
        if (some.sum() if some.dtype == np.bool_ else len(some)) == len(self):
            return self
        return _Rows(*(getattr(self, name)[some] for name in self.__slots__))


class _Sums(NamedTuple):
    """Sums of the weights of N rows, relative to the weight of the most likely token."""

    blocks: Doubles
    """[N, number of blocks]: of the block and all before it."""
    total: Doubles
    """[N]"""
    margin: Doubles
    """[N]: how far such a sum may be from the same sum of the exact choice."""

    def of(self, rows: Ints | _Bools) -> _Sums:
        """The sums of some of the rows."""
        return _Sums(self.blocks[rows], self.total[rows], self.margin[rows])


def choose(logits: Floats, rows: Sequence[int], params: Sequence[SamplingParams], numbers: Sequence[float]) -> Chosen:
    """A token for each of the rows [N] of the logits [·, vocab_size], the largest of each row finite; temperatures above 0.
    `numbers`: in [0, 1), they decide the tokens."""
    chosen = Chosen(np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.bool_))

    def note(group: _Rows, result: Chosen) -> None:
        chosen.tokens[group.index] = result.tokens
        chosen.is_certain[group.index] = result.is_certain

    # Sums that are not finite decide nothing.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        every = _Rows.of(logits, rows, params, numbers)
        by_rank = every.top_k < logits.shape[1]
        by_share = ~by_rank & (every.top_p < 1)
        by_weight = ~by_rank & ~by_share & (every.min_p > 0)
        if by_rank.any():
            some = every[by_rank]
            _choose_among(logits, some, thresholds(logits, some.row, some.top_k), None, note)
        if by_weight.any():
            some = every[by_weight]
            _choose_among(logits, some, _least_logits(some), None, note)
        for dtype in (np.float32, np.float64):
            if len(some := every[~by_rank & ~by_share & ~by_weight & ~chosen.is_certain]):
                note(some, _choose_of_all(logits, some, _sums(logits, some, dtype)))
            if len(some := every[by_share & ~chosen.is_certain]):
                sums = _sums(logits, some, dtype)
                _choose_among(logits, some, _least_logits_of_share(logits, some, sums), sums, note)
    return chosen


def _sums(logits: Floats, rows: _Rows, dtype: type[np.floating[Any]]) -> _Sums:
    """Sum the weights of the rows in numbers of the type."""
    vocab_size = logits.shape[1]
    num_blocks = -(-vocab_size // _BLOCK)
    of_blocks = np.empty((len(rows), num_blocks), dtype=dtype)
    memory = np.zeros(num_blocks * _BLOCK, dtype=dtype)  # of one row: it stays in the CPU's cache
    weights = memory[:vocab_size]
    largest, factors = rows.largest.astype(dtype), (1 / rows.temperature).astype(dtype)
    for index, row in enumerate(rows.row.tolist()):
        np.subtract(logits[row], largest[index], out=weights)
        np.multiply(weights, factors[index], out=weights)
        np.exp(weights, out=weights)
        np.add.reduce(memory.reshape(num_blocks, _BLOCK), axis=1, out=of_blocks[index])
    blocks = np.cumsum(of_blocks, axis=1, dtype=np.float64)
    return _Sums(blocks, blocks[:, -1], blocks[:, -1] * _slack(rows, vocab_size, dtype))


def _slack(rows: _Rows, vocab_size: int, dtype: type[np.floating[Any]]) -> Doubles:
    """[N]: how far sums of weights may be from those of the exact choice, as a share of the total.

    Exponents, exp and each addition are rounded, whatever their order, in the sum and in the total. Exponents are rounded three
    times here, and are a difference of two quotients there; where a weight is above 0 they are at most 746. exp is within 4 units
    of the last place. In float32 only exponents up to 32 count: all smaller weights together are below vocab_size · 2**-46.
    """
    float64_slack = 2 * (vocab_size + 2 * np.abs(rows.largest) / rows.temperature + 4096) * 2.0**-53
    if dtype is np.float64:
        return 2 * float64_slack
    return float64_slack + 2 * (_BLOCK + 3 * 32 + 8) * 2.0**-24 + vocab_size * 2.0**-45


def _choose_of_all(logits: Floats, rows: _Rows, sums: _Sums) -> Chosen:
    """Choose for rows without truncation."""
    vocab_size, index = logits.shape[1], np.arange(len(rows))
    target = rows.number * sums.total
    block = np.minimum((sums.blocks <= target[:, None]).sum(axis=1), sums.blocks.shape[1] - 1)
    before = np.where(block > 0, sums.blocks[index, block - 1], 0.0)
    ids = block[:, None] * _BLOCK + np.arange(_BLOCK)
    in_block = logits[rows.row[:, None], np.minimum(ids, vocab_size - 1)]
    weights = np.exp((in_block - rows.largest[:, None]) / rows.temperature[:, None])
    weights[ids >= vocab_size] = 0.0
    inside = before[:, None] + np.cumsum(weights, axis=1)
    column = np.minimum((inside <= target[:, None]).sum(axis=1), _BLOCK - 1)
    below = np.where(column > 0, inside[index, column - 1], before)
    return Chosen(ids[index, column], (inside[index, column] - target > sums.margin) & (target - below > sums.margin))


def _least_logits(rows: _Rows) -> Floats:
    """[N]: min-p keeps no token with a smaller logit."""
    distance = rows.temperature * np.log(rows.min_p)
    guard = _GUARD * (np.abs(rows.largest) + np.abs(distance))
    return (rows.largest + distance - guard).astype(np.float32)


def _least_logits_of_share(logits: Floats, rows: _Rows, sums: _Sums) -> Floats:
    """[N]: the tokens with smaller logits have about half the weight that top-p drops, or more if few tokens have the most of it.
    Estimated: the others may have less than the share."""
    stride = -(-logits.shape[1] // _SAMPLE)
    sample = np.sort(logits[rows.row, ::stride], axis=1)
    weights = np.exp((sample - rows.largest[:, None]) / rows.temperature[:, None])
    dropped = (1 - rows.top_p) * sums.total / 2
    column = (np.cumsum(weights, axis=1) * stride <= dropped[:, None]).sum(axis=1)
    estimated = sample[np.arange(len(rows)), np.minimum(column, sample.shape[1] - 1)]
    # If the share ends among tokens that weigh less than the margin, it decides nothing to look at them.
    heavy = rows.largest + np.fmin(0.0, rows.temperature * np.log(sums.margin))
    least: Floats = np.maximum(estimated, heavy.astype(np.float32))
    return least


def _choose_among(
    logits: Floats, rows: _Rows, least: Floats, sums: _Sums | None, note: Callable[[_Rows, Chosen], None]
) -> None:
    """Choose among the tokens whose logits are not below `least` [N]. `sums`: of all tokens, for rows with top-p and no top-k."""
    for group, tokens in ranked(logits, rows.row, least):
        note(rows[group], _choose_of(tokens, rows[group], None if sums is None else sums.of(group)))


def _choose_of(tokens: Ranked, rows: _Rows, sums: _Sums | None) -> Chosen:
    """Choose as `truncation.truncate` and `choice.invert` do, to the bit."""
    temperature = rows.temperature[:, None]
    weights = _exp(tokens.logits / temperature - rows.largest[:, None] / temperature)
    weights[np.arange(weights.shape[1]) >= rows.top_k[:, None]] = 0.0
    cumulative = _cumulative(weights)
    share = np.where(rows.top_p < 1, rows.top_p * (cumulative[:, -1] if sums is None else sums.total), np.inf)
    before = np.zeros_like(cumulative)
    before[:, 1:] = cumulative[:, :-1]
    weights[(before >= share[:, None]) | (weights < rows.min_p[:, None])] = 0.0
    is_certain = np.ones(len(weights), dtype=np.bool_)
    if sums is not None:
        # No token may be near to the end of the share, and the tokens must reach it.
        is_far = np.abs(before - share[:, None]).min(axis=1) > sums.margin
        is_certain = is_far & (cumulative[:, -1] - share > sums.margin)
    width = int(np.flatnonzero(weights.any(axis=0))[-1]) + 1
    order = np.argsort(tokens.ids[:, :width], axis=1)
    cumulative = _cumulative(np.take_along_axis(weights[:, :width], order, axis=1))
    total = cumulative[:, -1:]
    columns = (cumulative <= rows.number[:, None] * total).sum(axis=1)
    last = (cumulative < total).sum(axis=1)
    index = np.arange(len(order))
    return Chosen(tokens.ids[index, order[index, np.minimum(columns, last)]], is_certain)


def _exp(exponents: Doubles) -> Doubles:
    """Compute exp in place, with the bits of the exact choice: numpy's differ in the last one."""
    torch.from_numpy(exponents).exp_()
    return exponents


def _cumulative(weights: Doubles) -> Doubles:
    sums: Doubles = torch.cumsum(torch.from_numpy(weights), dim=1).numpy()  # numpy's takes four times as long
    return sums
