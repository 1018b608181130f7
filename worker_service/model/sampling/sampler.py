"""Sampling, in the order in which transformers and vLLM apply the options:

    logit bias → banned ids (min_tokens) → repetition, frequency, presence penalty      adjustment.py
    → the most likely token, or temperature → top-k → top-p → min-p → draw               choice.py, truncation.py

Log-probabilities are the model's own, of the logits before all this. A row's token depends on that row and its draw alone, never
on its neighbours: the same logits, options, seed and position give the same token in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.step import SampledToken, TokenLogprobs
from .adjustment import adjust
from .choice import choose
from .draw import Draw, SamplingError
from .logprobs import logprobs_of


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    """One token per row of logits [N, vocab_size], which stay as they are. Raises SamplingError for NaN."""
    best, tokens = torch.max(logits, dim=-1)  # the first of equal maxima: the lowest id; NaN if any logit is
    _check_numbers(best)
    adjusted = [row for row, draw in enumerate(draws) if draw.adjusts_logits]
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and not draw.adjusts_logits]
    if drawn:
        tokens[drawn] = choose(_rows(logits, drawn).float(), [draws[row] for row in drawn])
    if adjusted:
        some = [draws[row] for row in adjusted]
        changed = logits[adjusted].float()  # a copy, by the index
        adjust(changed, some)
        tokens[adjusted] = choose(changed, some)
    return _with_logprobs(logits, tokens, draws)


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """What each row of logits [N, vocab_size] says of the token that the prompt has there. Raises SamplingError for NaN."""
    _check_numbers(logits.amax(dim=-1))
    return logprobs_of(logits, torch.tensor(targets, device=logits.device), [num_top] * len(targets))


def _check_numbers(best: torch.Tensor) -> None:
    if torch.isnan(best).any():
        bad = torch.isnan(best).nonzero().flatten().tolist()
        raise SamplingError(f"the model's logits are NaN in rows {bad} of {len(best)}")


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _with_logprobs(logits: torch.Tensor, tokens: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken]:
    token_ids: list[int] = tokens.tolist()
    sampled = [SampledToken(token_id) for token_id in token_ids]
    wanted = {row: draw.sampling.num_logprobs for row, draw in enumerate(draws)}
    num_top = {row: count for row, count in wanted.items() if count is not None}
    if num_top:
        rows = list(num_top)
        found = logprobs_of(_rows(logits, rows), tokens[rows], list(num_top.values()))
        for row, logprobs in zip(rows, found, strict=True):
            sampled[row] = SampledToken(token_ids[row], logprobs)
    return sampled
