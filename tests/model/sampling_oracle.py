"""What sampling must give, in plain Python and one row at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor

from kvpool.worker_service.model.sampling.adjustment import Draw
from kvpool.worker_service.step import SamplingParams
from kvpool.worker_service.token_counts import TokenCounts


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at a position."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


@dataclass(frozen=True)
class Row:
    """One sequence that wants its next token."""

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    banned_ids: Sequence[int] = ()
    position: int = 0

    def draw(self) -> Draw:
        """The row as the sampler gets it."""
        counts = TokenCounts(self.prompt, self.generated) if self.params.has_penalties else None
        return Draw(self.params, self.position, self.banned_ids, counts)


def adjusted(logits: Sequence[float], row: Row) -> list[float]:
    """The logits behind bias, ban and penalties."""
    params, result = row.params, list(logits)
    for token, bias in params.logit_bias.items():
        result[token] += bias
    for token in row.banned_ids:
        result[token] = -math.inf
    for token in {*row.prompt, *row.generated}:
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token in row.generated:
        result[token] -= params.frequency_penalty
    for token in set(row.generated):
        result[token] -= params.presence_penalty
    return ruled(result, row) if params.has_rules else result


def ruled(logits: Sequence[float], row: Row) -> list[float]:
    """With the processors of transformers for tokens that must not follow."""
    params, prompt = row.params, torch.tensor([list(row.prompt)])
    processors = LogitsProcessorList()
    if size := params.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(size))
    if size := params.encoder_no_repeat_ngram_size:
        processors.append(EncoderNoRepeatNGramLogitsProcessor(size, prompt))
    if words := params.bad_words_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in words]))
    if params.suppress_tokens:
        processors.append(SuppressTokensLogitsProcessor(list(params.suppress_tokens)))
    if params.begin_suppress_tokens:
        processors.append(SuppressTokensAtBeginLogitsProcessor(list(params.begin_suppress_tokens), len(row.prompt)))
    tokens = torch.tensor([[*row.prompt, *row.generated]])
    found: list[float] = processors(tokens, torch.tensor([list(logits)], dtype=torch.float64))[0].tolist()
    return found


def kept(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Token ids that truncation leaves, ascending."""
    best = max(logits)
    weights = [math.exp((value - best) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, left, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        left.append(token)
        mass += weights[token]
        if mass >= params.top_p * total:
            break
    return sorted(token for token in left if weights[token] >= params.min_p)


def sampled(logits: Sequence[float], row: Row) -> int:
    """The next token."""
    values, params = adjusted(logits, row), row.params
    if params.temperature == 0:
        return values.index(max(values))
    left, best = kept(values, params), max(values)
    weights = [math.exp((values[token] - best) / params.temperature) for token in left]
    target, mass = uniform(params.seed, row.position) * sum(weights), 0.0
    for token, weight in zip(left, weights, strict=True):
        mass += weight
        if mass > target:
            return token
    return left[-1]
