"""Bias, banned ids and penalties: what transformers' own processors make of the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.token_counts import TokenCounts
from kvpool.worker_service.model.sampling.adjustment import adjust
from kvpool.worker_service.model.sampling.draw import Draw
from tests.model.sampling_oracle import Row

VOCAB_SIZE = 23
TOKEN = st.integers(0, VOCAB_SIZE - 1)
PENALTY = st.sampled_from([0.0, 0.0, 0.5, -0.75, 2.0, -2.0])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.5, 10.0])),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        logit_bias=draw(st.dictionaries(TOKEN, st.floats(-100, 100, width=32, allow_subnormal=False), max_size=4)),
    )
    prompt, generated = draw(st.lists(TOKEN, min_size=1, max_size=12)), draw(st.lists(TOKEN, max_size=12))
    return Row(params, prompt, generated, draw(st.lists(TOKEN, unique=True, max_size=3)))


def by_transformers(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """One row [vocab_size] through the processors, in the documented order."""
    params, scores = row.params, logits[None].clone()
    ids = torch.tensor([[*row.prompt, *row.generated]])
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if row.banned_ids:
        too_short = len(row.generated) + 1
        scores = MinNewTokensLengthLogitsProcessor(len(row.prompt), too_short, list(row.banned_ids))(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = scores[0]
    # transformers has none of these: a plain loop.
    for token in row.generated:
        scores[token] -= params.frequency_penalty
    for token in set(row.generated):
        scores[token] -= params.presence_penalty
    return scores


BANNED_IN_VAIN = Row(
    SamplingParams(logit_bias={2: 100.0}, repetition_penalty=0.1, presence_penalty=-2.0), [2], [2], banned_ids=[2]
)
"""All that can be added to a banned id is."""


@given(batch=st.lists(rows(), min_size=1, max_size=6), seed=st.integers(0, 9))
@example(batch=[BANNED_IN_VAIN, Row(prompt=[0])], seed=0)
def test_a_batch_is_what_transformers_makes_of_each_row(batch: list[Row], seed: int) -> None:
    logits = torch.randn(len(batch), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4
    expected = [by_transformers(logits[index], row) for index, row in enumerate(batch)]
    adjust(logits, [row.draw() for row in batch])
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_ids_that_the_head_does_not_have_are_passed_over() -> None:
    """Some models embed more tokens than they predict."""
    params = SamplingParams(logit_bias={9: 1.0}, presence_penalty=1.0)
    logits = torch.zeros(2, 3)
    adjust(logits, [Row(params, [0], [9, 1], banned_ids=[3, 2]).draw()] * 2)
    assert logits.tolist() == [[0.0, -1.0, float("-inf")]] * 2


def test_penalties_without_the_tokens_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="tokens of the sequence"):
        adjust(torch.zeros(1, 3), [Draw(SamplingParams(presence_penalty=1.0), 0)])


@given(
    prompt=st.lists(st.integers(0, 300), max_size=200),
    answer=st.lists(st.integers(0, 300), max_size=200),
    data=st.data(),
)
def test_counts_are_the_same_counted_at_once_or_one_by_one(prompt: list[int], answer: list[int], data: Any) -> None:
    """Also over the end of what was allocated."""
    split = data.draw(st.integers(0, len(answer)))
    counts = TokenCounts(prompt, answer[:split])
    for token in answer[split:]:
        counts.add(token)
    assert counts.ids.tolist() == list(dict.fromkeys([*prompt, *answer]))
    assert counts.num_generated.tolist() == [answer.count(token) for token in counts.ids]
