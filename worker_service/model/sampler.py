"""From logits to tokens: greedy, or one uniform number per token through the inverse of the distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..engine.step import SampledToken, SamplingParams, TokenLogprobs


class Draw(NamedTuple):
    """How one row of logits becomes a token."""

    sampling: SamplingParams
    position: int
    """Absolute position that the token will have in its sequence."""


class SamplingError(RuntimeError):
    """The logits are not numbers."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per row of logits [N, vocab_size].

    A row's token depends on that row and its draw alone, never on its neighbours: the same logits, seed and position
    give the same token in every batch.
    """
    best, tokens = torch.max(logits, dim=-1)  # the first of equal maxima: the lowest id; NaN if any logit is
    if torch.isnan(best).any():
        bad = torch.isnan(best).nonzero().flatten().tolist()
        raise SamplingError(f"the model's logits are NaN in rows {bad} of {len(draws)}")
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        tokens[rows] = _draw(logits[rows], [draws[row] for row in drawn])
    return _with_logprobs(logits, tokens, [draw.sampling.num_logprobs for draw in draws])


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at a position: counter-based (Philox), so it needs no history."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Inverse CDF over the tokens in the order of their ids, in float64. Returns [N] int64."""
    device = logits.device
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64, device=device)
    scaled = logits.double() / temperatures[:, None]
    for row, draw in enumerate(draws):
        _truncate(scaled[row], draw.sampling.top_k, draw.sampling.top_p)
    weights = torch.exp(scaled - scaled.amax(dim=-1, keepdim=True))
    cumulative = torch.cumsum(weights, dim=-1)
    numbers = [uniform(draw.sampling.seed, draw.position) for draw in draws]
    targets = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    # Rounding can lift a target to the very end; the last token with any weight is meant.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous(), right=False)[:, 0]
    return torch.minimum(tokens, last)


def _truncate(scaled: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set the logits [vocab_size] of tokens outside top-k, then outside top-p of what is left, to −inf, in place.

    Among equal logits the lower id counts as more likely.
    """
    limited = 0 < top_k < scaled.shape[0]
    if not limited and top_p >= 1.0:
        return
    ordered, ids = torch.sort(scaled, descending=True, stable=True)
    keep = top_k if limited else ordered.shape[0]
    if top_p < 1.0:
        weights = torch.exp(ordered[:keep] - ordered[0])
        cumulative = torch.cumsum(weights, dim=0)
        enough = torch.searchsorted(cumulative, top_p * cumulative[-1:], right=False)
        keep = min(keep, int(enough) + 1)
    scaled[ids[keep:]] = float("-inf")


def _with_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: Sequence[int | None]) -> list[SampledToken]:
    token_ids: list[int] = tokens.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    for row, num_top in enumerate(wanted):
        if num_top is None:
            continue
        logprobs = torch.log_softmax(logits[row].float(), dim=-1)
        found = TokenLogprobs(float(logprobs[token_ids[row]]), _top(logprobs, num_top))
        sampled[row] = SampledToken(token_ids[row], found)
    return sampled


def _top(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    if count == 0:
        return []
    best = torch.topk(logprobs, min(count, logprobs.shape[0]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
