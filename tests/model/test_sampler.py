"""Sampling against a slow oracle in plain Python, and against transformers' processors."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from worker_service.engine.step import SamplingParams
from worker_service.model.sampling.choice import uniform
from worker_service.model.sampling.draw import Draw, SamplingError
from worker_service.model.sampling.sampler import sample

VOCAB_SIZE = 50


def kept_by_oracle(logits: list[float], params: SamplingParams) -> list[int]:
    """Token ids that truncation leaves, ascending."""
    weights = [math.exp((value - max(logits)) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        kept.append(token)
        mass += weights[token]
        if mass >= params.top_p * total:
            break
    return sorted(kept)


def sampled_by_oracle(logits: list[float], draw: Draw) -> int:
    if draw.sampling.temperature == 0:
        return logits.index(max(logits))
    kept = kept_by_oracle(logits, draw.sampling)
    weights = [math.exp((logits[token] - max(logits)) / draw.sampling.temperature) for token in kept]
    target, mass = uniform(draw.sampling.seed, draw.position) * sum(weights), 0.0
    for token, weight in zip(kept, weights, strict=True):
        mass += weight
        if mass > target:
            return token
    return kept[-1]


def random_draws(count: int) -> list[Draw]:
    numbers = random.Random(5)
    return [
        Draw(
            SamplingParams(
                temperature=numbers.choice([0.0, 0.3, 1.0, 2.5]),
                top_k=numbers.choice([0, 1, 5, VOCAB_SIZE, 1000]),
                top_p=numbers.choice([1.0, 0.9, 0.5, 0.01]),
                seed=numbers.choice([0, 1, 2**64 - 1, numbers.randrange(2**64)]),
            ),
            position=numbers.randrange(10000),
        )
        for _ in range(count)
    ]


def random_logits(count: int) -> torch.Tensor:
    return torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3


def test_equals_the_oracle_in_one_batch_and_alone() -> None:
    draws, logits = random_draws(400), random_logits(400)
    together = [token.token_id for token in sample(logits, draws)]
    assert together == [sampled_by_oracle(row.tolist(), draw) for row, draw in zip(logits, draws, strict=True)]
    alone = [sample(logits[row : row + 1], [draws[row]])[0].token_id for row in range(400)]
    assert together == alone


def test_neighbours_and_order_change_nothing() -> None:
    draws, logits = random_draws(60), random_logits(60)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits[order], [draws[row] for row in order])
    assert [token.token_id for token in shuffled] == [sample(logits, draws)[row].token_id for row in order]


def test_frequencies_are_those_of_the_softmax() -> None:
    """A χ² test with fixed draws: far above the 99.99 % quantile only if the draw is wrong."""
    count, logits = 6000, torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    draws = [Draw(SamplingParams(temperature=0.8, seed=11), position) for position in range(count)]
    tokens = torch.tensor([token.token_id for token in sample(logits.expand(count, -1), draws)])
    expected = torch.softmax(logits / 0.8, 0) * count
    observed = torch.bincount(tokens, minlength=5)
    assert float(((observed - expected) ** 2 / expected).sum()) < 23.5


def test_seed_and_position_decide_the_number() -> None:
    numbers = {(seed, position): uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(200)}
    assert len(set(numbers.values())) == len(numbers)
    assert all(0 <= number < 1 for number in numbers.values())
    assert numbers == {key: uniform(*key) for key in numbers}
    # Published with each seed's texts: must never change.
    assert uniform(42, 7) == 0.4074136540795371


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (7, 0.6), (0, 0.001), (1, 0.5)])
def test_truncation_keeps_what_transformers_keeps(top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p)
    for row in random_logits(40):
        scores = TemperatureLogitsWarper(0.7)(None, row[None])
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        kept = scores[0].isfinite().nonzero().flatten().tolist()
        assert kept_by_oracle(row.tolist(), params) == kept
        # The oracle is what sample is tested against; here also: nothing outside is ever drawn, all inside is.
        draws = [Draw(SamplingParams(0.7, top_k, top_p, seed=1), position) for position in range(50)]
        assert {token.token_id for token in sample(row.expand(50, -1), draws)} <= set(kept)


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]])
    assert sample(logits, [Draw(SamplingParams(), 0)])[0].token_id == 1


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    draws = [Draw(SamplingParams(temperature=1.0, top_k=2, seed=3), position) for position in range(50)]
    tokens = {token.token_id for token in sample(torch.ones(50, 6), draws)}
    assert tokens == {0, 1}


def test_logprobs_are_of_the_raw_logits() -> None:
    """Temperature and truncation choose the token; its log-probability is the model's."""
    logits = random_logits(3)
    wanted = [None, 0, 4]
    draws = [Draw(SamplingParams(2.0, top_k=3, seed=9, num_logprobs=count), 5) for count in wanted]
    sampled = sample(logits, draws)
    logprobs = torch.log_softmax(logits, -1)
    assert sampled[0].logprobs is None
    assert sampled[1].logprobs is not None
    assert sampled[1].logprobs.logprob == pytest.approx(float(logprobs[1, sampled[1].token_id]))
    assert sampled[1].logprobs.top == []
    best = logprobs[2].topk(4)
    assert sampled[2].logprobs is not None
    assert [token for token, _ in sampled[2].logprobs.top] == best.indices.tolist()
    assert [value for _, value in sampled[2].logprobs.top] == pytest.approx(best.values.tolist())


def test_more_logprobs_than_tokens_are_all_tokens_with_ties_by_id() -> None:
    logprobs = sample(torch.tensor([[1.0, 2.0, 1.0]]), [Draw(SamplingParams(num_logprobs=20), 0)])[0].logprobs
    assert logprobs is not None
    assert [token for token, _ in logprobs.top] == [1, 0, 2]


def test_bfloat16_logits_are_sampled_in_full_precision() -> None:
    logits = random_logits(20).bfloat16()
    draws = random_draws(20)
    assert sample(logits, draws) == sample(logits.float(), draws)


def test_nan_is_an_error_and_names_the_row() -> None:
    logits = random_logits(3)
    logits[1, 7] = float("nan")
    with pytest.raises(SamplingError, match=r"NaN in rows \[1\] of 3"):
        sample(logits, [Draw(SamplingParams(), 0)] * 3)
