"""Top-k, then top-p of the rest, then min-p of the rest: over all rows at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...step import SamplingParams
from .ranking import best

NUM_CANDIDATES = (256, 4096)
"""Numbers of most likely tokens to try, for rows that keep more the next one; after these, all tokens."""

_CPU_NUMBERS = 1 << 16
"""Numbers that a CPU computes at once, 512 KiB: they stay in its cache, and their memory is used again instead of being returned to
the system and zeroed."""


@dataclass(frozen=True, slots=True)
class TruncationLimits:
    """Temperature and truncation of each row. All [N, 1]."""

    temperature: torch.Tensor
    """float64, above 0."""
    top_k: torch.Tensor
    """int64; vocab_size: all."""
    top_p: torch.Tensor
    """float64; 1: all."""
    min_p: torch.Tensor
    """float64; 0: all."""
    has_min_p: bool
    """Whether any min_p is above 0."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> TruncationLimits:
        """The limits of these params, one row for each."""

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        return cls(
            column([sampling.temperature for sampling in params], torch.float64),
            column([min(sampling.top_k or vocab_size, vocab_size) for sampling in params], torch.int64),
            column([sampling.top_p for sampling in params], torch.float64),
            column([sampling.min_p for sampling in params], torch.float64),
            any(sampling.min_p for sampling in params),
        )

    def rows(self, rows: torch.Tensor) -> TruncationLimits:
        """Some of the rows, in order."""
        if len(rows) == len(self.temperature):
            return self
        return TruncationLimits(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.has_min_p
        )

    def is_ranked(self, vocab_size: int) -> torch.Tensor:
        """[N] bool: rows in which a token's rank decides whether it is kept."""
        return ((self.top_k < vocab_size) | (self.top_p < 1))[:, 0]


class Kept(NamedTuple):
    """The tokens that truncation leaves."""

    ids: torch.Tensor
    """[N, M] int64: candidates, most likely first."""
    weights: torch.Tensor
    """[N, M] float64: probabilities relative to that of the most likely one; 0: dropped."""
    is_complete: torch.Tensor
    """[N] bool: whether all kept tokens are in `ids`. Other rows need more candidates."""


def weigh(logits: torch.Tensor, limits: TruncationLimits) -> torch.Tensor:
    """Weights [N, vocab_size] float64 of all tokens, relative to the most likely one; 0: dropped by min-p. Only for rows that are
    not ranked."""
    weights = _relative(logits, logits.amax(dim=-1, keepdim=True), limits)
    if limits.has_min_p:
        weights.masked_fill_(weights < limits.min_p, 0.0)
    return weights


def truncate(logits: torch.Tensor, limits: TruncationLimits, num_candidates: int) -> Kept:
    """The tokens kept of the logits [N, vocab_size], float32. Of equally likely tokens the lower id counts as more likely.

    A complete row's result does not depend on num_candidates: sums have one order, most likely tokens first (top-p's total, without
    top-k: by id).
    """
    vocab_size = logits.shape[1]
    ids = best(logits, num_candidates)
    weights = _relative(logits.gather(1, ids), logits.gather(1, ids[:, :1]), limits)
    weights *= torch.arange(num_candidates, device=logits.device) < limits.top_k
    cumulative = torch.cumsum(weights, dim=-1)
    # Top-p keeps a token if the sum of those before it is below the share.
    enough = torch.where(limits.top_p < 1, limits.top_p * _total(logits, cumulative, limits), float("inf"))
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    weights.masked_fill_(before >= enough, 0.0).masked_fill_(weights < limits.min_p, 0.0)
    all_of_top_k = limits.top_k <= num_candidates
    rest_not_needed = (limits.top_k == vocab_size) & (cumulative[:, -1:] >= enough)
    return Kept(ids, weights, (all_of_top_k | rest_not_needed)[:, 0])


def _relative(logits: torch.Tensor, largest: torch.Tensor, limits: TruncationLimits) -> torch.Tensor:
    # In place: new memory for each of the numbers costs more than the arithmetic.
    exponents = logits.double().div_(limits.temperature)
    return exponents.sub_(largest.double() / limits.temperature).exp_()


def portions(rows: torch.Tensor, width: int) -> Sequence[torch.Tensor]:
    """The rows in the portions that are computed at once, each row with `width` numbers. Empty if there are no rows."""
    if not len(rows):
        return ()
    return torch.split(rows, max(1, _CPU_NUMBERS // width)) if rows.device.type == "cpu" else (rows,)


def select(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some of the rows of the logits, in order: a copy, unless these are all of them."""
    return logits if len(rows) == len(logits) else logits[rows]


def _total(logits: torch.Tensor, cumulative: torch.Tensor, limits: TruncationLimits) -> torch.Tensor:
    """[N, 1]: the sum of weights that top-p is a share of."""
    vocab_size = logits.shape[1]
    total = cumulative[:, -1:].clone()
    rows = ((limits.top_k == vocab_size) & (limits.top_p < 1))[:, 0].nonzero()[:, 0]
    if cumulative.shape[1] < vocab_size:
        for some in portions(rows, vocab_size):
            chosen = select(logits, some)
            weights = _relative(chosen, chosen.amax(dim=-1, keepdim=True), limits.rows(some))
            total[some] = torch.cumsum(weights, dim=-1)[:, -1:]
    return total
