"""The token of each row: the most likely one, or one uniform number through the inverse of the distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .draw import Draw
from .truncation import NUM_CANDIDATES, Limits, truncate, weigh

MAX_WEIGHTS = 1 << 22
"""Weights that are computed at a time: 32 MiB. More rows are drawn one slice after the other."""


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens [N] int64 for the logits [N, vocab_size], float32: greedy where the temperature is 0, else drawn."""
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    size = max(1, MAX_WEIGHTS // logits.shape[1])
    for first in range(0, len(drawn), size):
        some = drawn[first : first + size]
        rows = torch.tensor(some, device=logits.device)
        tokens[rows] = draw_tokens(logits[rows], [draws[row] for row in some])
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at a position: counter-based (Philox), so it needs no history."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def draw_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens [N] int64, each drawn by its own number from what truncation leaves of its row; in float64."""
    device, vocab_size = logits.device, logits.shape[1]
    tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
    uniforms = [uniform(draw.sampling.seed, draw.position) for draw in draws]
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=device)[:, None]
    limits = Limits.of([draw.sampling for draw in draws], vocab_size, device)
    ranked = limits.is_ranked(vocab_size)
    rows = (~ranked).nonzero()[:, 0]
    if len(rows):
        tokens[rows] = invert(weigh(logits[rows], limits.rows(rows)), numbers[rows])
    rows = ranked.nonzero()[:, 0]
    for num_candidates in (*(count for count in NUM_CANDIDATES if count < vocab_size), vocab_size):
        if len(rows):
            ids, weights, is_complete = truncate(logits[rows], limits.rows(rows), num_candidates)
            ids, order = ids.sort(dim=-1)
            chosen = invert(weights.gather(1, order), numbers[rows])
            tokens[rows] = ids.gather(1, chosen[:, None])[:, 0]
            rows = rows[~is_complete]
    return tokens


def invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Columns [N] that the numbers [N, 1] in [0, 1) fall on, when each row of the weights [N, M] is laid out on [0, 1)."""
    cumulative = torch.cumsum(weights, dim=-1)
    columns = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    # Rounding can lift a number to the very end; the last column with any weight is meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(columns, last)
