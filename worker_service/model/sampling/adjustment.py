"""Adjusts logits before sampling: bias, penalties, forced and banned ids.

Reads and writes only the adjusted logits: with N tokens in all sequences that is O(N), not O(rows · vocab_size).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...step import SamplingParams
from ...token_counts import TokenCounts

_IntArray = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """Options, position and sequence of one row of logits."""

    sampling: SamplingParams
    position: int
    """Absolute position that the token will have in its sequence."""
    banned_ids: Collection[int] = ()
    """Ids that must not be chosen."""
    counts: TokenCounts | None = None
    """The sequence's tokens; needed if `sampling` has penalties."""
    forced_ids: Sequence[int] = ()
    """Ids of which one must be chosen; none: any may be."""
    num_candidates: int = 0
    """Best tokens to find for a beam search, in place of a choice."""

    @property
    def adjusts_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's."""
        return bool(self.sampling.logit_bias or self.banned_ids or self.forced_ids) or self.sampling.has_penalties


def adjust(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Change the logits [N, vocab_size] in place, float32 and contiguous: add the bias, apply penalties, set forced ids to 0 and
    the others of their row to −inf, set banned ids to −inf. Ignores ids outside the vocabulary.

    The repetition penalty p (Keskar et al. 2019, arXiv:1909.05858) changes a positive logit x to x / p and any other to x · p, once
    for each token of prompt and answer. Frequency and presence penalty subtract f · count and, if count > 0, q; count is that of
    the answer.
    """
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    _add_bias(logits, draws)
    _penalise(logits, [row for row, draw in enumerate(draws) if draw.sampling.has_penalties], draws)
    _force(logits, draws)
    _ban(logits, draws)


def _add_bias(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    rows = [row for row, draw in enumerate(draws) if draw.sampling.logit_bias]
    biases = [draws[row].sampling.logit_bias for row in rows]
    where = _Places(logits, rows, [_array(bias.keys()) for bias in biases])
    if where:
        added = [np.fromiter(bias.values(), np.float64, len(bias)) for bias in biases]
        where.write(where.read() + where.spread(added))


def _force(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    for row, draw in enumerate(draws):
        if draw.forced_ids:
            logits[row] = float("-inf")
    rows = [row for row, draw in enumerate(draws) if draw.forced_ids]
    _Places(logits, rows, [_array(draws[row].forced_ids) for row in rows]).write(0.0)


def _ban(logits: torch.Tensor, draws: Sequence[Draw]) -> None:
    rows = [row for row, draw in enumerate(draws) if draw.banned_ids]
    _Places(logits, rows, [_array(draws[row].banned_ids) for row in rows]).write(float("-inf"))


def _penalise(logits: torch.Tensor, rows: Sequence[int], draws: Sequence[Draw]) -> None:
    ids: list[_IntArray] = []
    generated: list[_IntArray] = []
    for row in rows:
        counts = draws[row].counts
        assert counts is not None, "penalties need the tokens of the sequence"
        ids.append(counts.ids)
        generated.append(counts.num_generated)
    where = _Places(logits, rows, ids)
    if not where:
        return
    params = [draws[row].sampling for row in rows]
    repetition = where.spread_each([sampling.repetition_penalty for sampling in params])
    presence = where.spread_each([sampling.presence_penalty for sampling in params])
    frequency = where.spread_each([sampling.frequency_penalty for sampling in params])
    count = where.spread(generated)
    values = where.read()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * count
    values -= presence * (count > 0)
    where.write(values)


class _Places:
    """Some logits of some rows, [M] in all, row by row. No id twice in one row."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[int], ids: Sequence[_IntArray]) -> None:
        self._flat = logits.view(-1)
        self._lengths = [len(of_row) for of_row in ids]
        vocab_size = logits.shape[1]
        every_id = np.concatenate([*ids, np.zeros(0, dtype=np.int64)])
        self._fits = every_id < vocab_size
        flat = np.repeat(np.asarray(rows, dtype=np.int64), self._lengths) * vocab_size + every_id
        self._index = torch.from_numpy(flat[self._fits]).to(logits.device)

    def __bool__(self) -> bool:
        return len(self._index) > 0

    def read(self) -> torch.Tensor:
        return self._flat[self._index]

    def write(self, values: torch.Tensor | float) -> None:
        if self:
            self._flat[self._index] = values

    def spread(self, values: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
        """Returns the values of all places, [M] float32. values: for each row, one for each of its ids."""
        return torch.from_numpy(np.concatenate(values)[self._fits].astype(np.float32)).to(self._flat.device)

    def spread_each(self, values: Sequence[float]) -> torch.Tensor:
        """Returns the values of all places, [M] float32. values: for each row, one for all of its ids."""
        return torch.from_numpy(np.repeat(values, self._lengths)[self._fits].astype(np.float32)).to(self._flat.device)


def _array(ids: Collection[int]) -> _IntArray:
    return np.fromiter(ids, dtype=np.int64, count=len(ids))
