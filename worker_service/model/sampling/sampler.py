"""Sampling, with the options applied in the order of transformers and vLLM:

    logit bias → banned ids (min_tokens) → repetition, frequency, presence penalty      adjustment.py
    → the most likely token, or temperature → truncation → draw                          choice.py, truncation.py

Log-probabilities are those of the model's own logits, before all this. A row's token depends only on that row and its draw: the
same logits, options, seed and position have the same token in every batch. A row whose largest logit is not finite, before or after
the adjustment, results in BadLogits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...engine.sampling_params import TokenLogprobs
from ...engine.step import BadLogits, SampledToken
from .adjustment import adjust
from .choice import draw_tokens
from .draw import Draw
from .logprobs import logprobs_of
from .ranking import most_likely


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | BadLogits]:
    """One token per row of logits [N, vocab_size], which do not change; BadLogits for a row without a choice."""
    best, tokens = most_likely(logits)
    bad = {row: BadLogits(draws[row].position, largest) for row, largest in _not_finite(best)}
    good = [row for row in range(len(draws)) if row not in bad]
    drawn = [row for row in good if draws[row].sampling.temperature > 0 and not draws[row].adjusts_logits]
    if drawn:
        tokens[drawn] = draw_tokens(_rows(logits, drawn).float(), [draws[row] for row in drawn])
    adjusted = [row for row in good if draws[row].adjusts_logits]
    if adjusted:
        changed = logits[adjusted].float()  # a copy, by the index
        tokens[adjusted], worst = _sample_adjusted(changed, [draws[row] for row in adjusted])
        bad |= {adjusted[index]: found for index, found in worst.items()}
    return _with_logprobs(logits, tokens, draws, bad)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], num_top: int, position: int
) -> list[TokenLogprobs] | BadLogits:
    """The log-probability of the prompt's token at each row of logits [N, vocab_size]; BadLogits if a row has none. `position`: of
    the first of these tokens."""
    for row, largest in _not_finite(logits.amax(dim=-1)):
        return BadLogits(position + row, largest)
    return logprobs_of(logits, torch.tensor(targets, device=logits.device), [num_top] * len(targets))


def _sample_adjusted(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[torch.Tensor, dict[int, BadLogits]]:
    """Tokens [N] of the logits [N, vocab_size], which are changed in place, and the rows without a valid token."""
    adjust(logits, draws)
    best, tokens = most_likely(logits)
    bad = {row: BadLogits(draws[row].position, largest, is_adjusted=True) for row, largest in _not_finite(best)}
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and row not in bad]
    if drawn:
        tokens[drawn] = draw_tokens(_rows(logits, drawn), [draws[row] for row in drawn])
    return tokens, bad


def _not_finite(best: torch.Tensor) -> list[tuple[int, float]]:
    """The rows whose largest logit is not finite, and that logit."""
    return [(row, largest) for row, largest in enumerate(best.tolist()) if not math.isfinite(largest)]


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _with_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, draws: Sequence[Draw], bad: dict[int, BadLogits]
) -> list[SampledToken | BadLogits]:
    token_ids: list[int] = tokens.tolist()
    sampled = [bad.get(row) or SampledToken(token_id) for row, token_id in enumerate(token_ids)]
    wanted = {row: draw.sampling.num_logprobs for row, draw in enumerate(draws) if row not in bad}
    num_top = {row: count for row, count in wanted.items() if count is not None}
    if num_top:
        rows = list(num_top)
        found = logprobs_of(_rows(logits, rows), tokens[rows], list(num_top.values()))
        for row, logprobs in zip(rows, found, strict=True):
            sampled[row] = SampledToken(token_ids[row], logprobs)
    return sampled
