"""Sampling, with the options applied in the order of transformers and vLLM:

    logit bias → repetition, frequency, presence penalty → forced ids → banned ids      adjustment.py
    → the most likely token, or temperature → truncation → draw                          choice.py, truncation.py

Log-probabilities are those of the model's own logits, before all this. A row's token depends only on that row and its draw: the
same logits, options, seed and position have the same token in every batch. A row whose largest logit is not finite, before or after
the adjustment, results in BadLogits. A beam search gets the most likely continuations instead (`candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...step import BadLogits, BeamCandidate, BeamCandidates, RowLogprobs, SampledToken
from .adjustment import Draw, adjust
from .choice import draw_tokens
from .ranking import best, most_likely


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | BadLogits]:
    """One token per row of logits [N, vocab_size], which do not change; BadLogits for a row without a choice."""
    best, tokens = most_likely(logits)
    bad = {row: BadLogits(draws[row].position, largest) for row, largest in _not_finite(best)}
    drawn: list[int] = []
    adjusted: list[int] = []
    for row, draw in enumerate(draws):
        if row in bad:
            continue
        if draw.adjusts_logits:
            adjusted.append(row)
        elif draw.sampling.temperature > 0:
            drawn.append(row)
    if drawn:
        _put(tokens, drawn, draw_tokens(logits, drawn, [draws[row] for row in drawn]))
    if adjusted:
        changed = _copy(logits, adjusted).float()
        new_tokens, new_bad = _sample_adjusted(changed, [draws[row] for row in adjusted])
        _put(tokens, adjusted, new_tokens)
        bad |= {adjusted[index]: why for index, why in new_bad.items()}
    return _with_logprobs(logits, tokens, draws, bad)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], num_top: int, position: int
) -> list[RowLogprobs] | BadLogits:
    """The log-probability of the prompt's token at each row of logits [N, vocab_size]; BadLogits if a row has none. `position`: of
    the first of these tokens."""
    for row, largest in _not_finite(logits.amax(dim=-1).tolist()):
        return BadLogits(position + row, largest)
    return logprobs_of(logits, torch.tensor(targets, device=logits.device), [num_top] * len(targets))


def _sample_adjusted(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], dict[int, BadLogits]]:
    """A token for each row of the logits [N, vocab_size], which are changed in place, and the rows without a valid token."""
    adjust(logits, draws)
    best, tokens = most_likely(logits)
    bad = {row: BadLogits(draws[row].position, largest, is_adjusted=True) for row, largest in _not_finite(best)}
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0 and row not in bad]
    if drawn:
        _put(tokens, drawn, draw_tokens(logits, drawn, [draws[row] for row in drawn]))
    return tokens, bad


def _not_finite(best: Sequence[float]) -> list[tuple[int, float]]:
    """The rows whose largest logit is not finite, and that logit."""
    return [(row, largest) for row, largest in enumerate(best) if not math.isfinite(largest)]


def _put(tokens: list[int], rows: Sequence[int], new: Sequence[int]) -> None:
    for row, token_id in zip(rows, new, strict=True):
        tokens[row] = token_id


def _copy(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    # Several times faster than an index on a CPU.
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _with_logprobs(
    logits: torch.Tensor, tokens: list[int], draws: Sequence[Draw], bad: dict[int, BadLogits]
) -> list[SampledToken | BadLogits]:
    sampled = [bad.get(row) or SampledToken(token_id) for row, token_id in enumerate(tokens)]
    counts = [(row, draw.sampling.num_logprobs) for row, draw in enumerate(draws)]
    num_top = {row: count for row, count in counts if count is not None and row not in bad}
    if num_top:
        rows = list(num_top)
        ids = torch.tensor([tokens[row] for row in rows], device=logits.device)
        results = logprobs_of(logits if len(rows) == len(logits) else _copy(logits, rows), ids, list(num_top.values()))
        for row, logprobs in zip(rows, results, strict=True):
            sampled[row] = SampledToken(tokens[row], logprobs)
    return sampled


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> list[RowLogprobs]:
    """The log-probabilities of each row of logits [N, vocab_size]: of its token in token_ids [N], and of its num_top most likely
    tokens (all tokens if there are fewer)."""
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    own: list[float] = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    return [RowLogprobs(value, pairs) for value, pairs in zip(own, _top(logits, logprobs, num_top), strict=True)]


def _top(logits: torch.Tensor, logprobs: torch.Tensor, nums: Sequence[int]) -> list[list[tuple[int, float]]]:
    """The most likely tokens of each row and their log-probabilities, as many as `nums` [N] says. logits: float32 without NaN."""
    most = min(max(nums, default=0), logits.shape[1])
    if not most:
        return [[] for _ in nums]
    ids = best(logits, most)
    pairs = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), nums, strict=True)
    return [list(zip(of_row[:num], values[:num], strict=True)) for of_row, values, num in pairs]


def candidates(logits: torch.Tensor, draws: Sequence[Draw]) -> list[BeamCandidates | BadLogits]:
    """The best tokens of each row of logits [N, vocab_size], which are left as they are; BadLogits for a row without a
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
    most = min(max(draw.num_candidates for draw in draws), logits.shape[1])
    # Bad rows have no order; they are left out below.
    ids = best(torch.nan_to_num(scores, nan=-math.inf), most)
    chosen, own = scores.gather(1, ids).tolist(), logprobs.gather(1, ids).tolist()
    top = _top(torch.nan_to_num(logits.float()), logprobs, [draw.sampling.num_logprobs or 0 for draw in draws])
    for row, (draw, of_row) in enumerate(zip(draws, ids.tolist(), strict=True)):
        if not math.isfinite(largest[row]):
            results.append(BadLogits(draw.position, largest[row]))
        elif not math.isfinite(chosen[row][0]):
            results.append(BadLogits(draw.position, chosen[row][0], is_adjusted=True))
        else:
            best_tokens = map(BeamCandidate, of_row[: draw.num_candidates], chosen[row], own[row])
            results.append(BeamCandidates(list(best_tokens), top[row]))
    return results
