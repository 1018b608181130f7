"""The most likely continuations of beams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...engine.step import BadLogits, BeamCandidate, BeamCandidates
from .adjustment import adjust
from .draw import Draw
from .ranking import best, most_likely


def candidates(logits: torch.Tensor, draws: Sequence[Draw], counts: Sequence[int]) -> list[BeamCandidates | BadLogits]:
    """The `counts` best tokens of each row of logits [N, vocab_size], which are left as they are; BadLogits for a row without a
    choice.

    A score is the log-probability, adjusted: transformers' beam search applies its processors to log-probabilities, not to logits,
    so a repetition penalty above 1 makes every repeated token less likely. Of equal scores the lower id comes first.
    """
    largest, _ = most_likely(logits)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    scores = logprobs
    if any(draw.adjusts_logits for draw in draws):
        scores = logprobs.clone()
        adjust(scores, draws)
    results: list[BeamCandidates | BadLogits] = []
    most = min(max(counts), logits.shape[1])
    # Bad rows have no order; they are left out below.
    ids = best(torch.nan_to_num(scores, nan=-math.inf), most)
    chosen, own = scores.gather(1, ids).tolist(), logprobs.gather(1, ids).tolist()
    top = _top(logits, logprobs, draws)
    for row, (draw, count, of_row) in enumerate(zip(draws, counts, ids.tolist(), strict=True)):
        if not math.isfinite(largest[row]):
            results.append(BadLogits(draw.position, largest[row]))
        elif not math.isfinite(chosen[row][0]):
            results.append(BadLogits(draw.position, chosen[row][0], is_adjusted=True))
        else:
            best_tokens = map(BeamCandidate, of_row[:count], chosen[row], own[row])
            results.append(BeamCandidates(list(best_tokens), top[row]))
    return results


def _top(logits: torch.Tensor, logprobs: torch.Tensor, draws: Sequence[Draw]) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each row and their log-probabilities, as many as its draw asks for."""
    nums = [draw.sampling.num_logprobs or 0 for draw in draws]
    most = min(max(nums), logits.shape[1])
    if not most:
        return [[] for _ in draws]
    ids = best(torch.nan_to_num(logits.float()), most)
    values = logprobs.gather(1, ids)
    return [
        list(zip(of_row[:num], row_values[:num], strict=True))
        for of_row, row_values, num in zip(ids.tolist(), values.tolist(), nums, strict=True)
    ]
