"""Bias, banned ids, penalties, top-k, top-p and min-p: what transformers' own processors make of the same logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvpool.worker_service.model.sampling.adjustment import adjust
from kvpool.worker_service.model.sampling.ranking import best, best_on_device, most_likely
from kvpool.worker_service.model.sampling.truncation import TruncationLimits, truncate, weigh
from kvpool.worker_service.step import SamplingParams
from kvpool.worker_service.token_counts import TokenCounts
from tests.model import sampling_oracle
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


# -- top-k, top-p and min-p


NUM_LOGITS = 40


@st.composite
def options(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, NUM_LOGITS - 1, NUM_LOGITS, 1000])),
        top_p=draw(st.one_of(st.just(1.0), st.floats(2**-7, 1.0, width=32))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(2**-9, 1.0, width=32))),
    )


def kept(logits: torch.Tensor, params: list[SamplingParams], num_candidates: int) -> list[list[int] | None]:
    """Per row of the logits the ids with any weight, ascending; None if more candidates are needed."""
    limits = TruncationLimits.of(params, logits.shape[1], logits.device)
    ranked = limits.is_ranked(logits.shape[1])
    ids, weights, is_complete = truncate(logits, limits, num_candidates)
    whole = weigh(logits, limits)
    found: list[list[int] | None] = []
    for row in range(len(params)):
        if not ranked[row]:
            found.append(whole[row].nonzero()[:, 0].tolist())
        else:
            found.append(sorted(ids[row][weights[row] > 0].tolist()) if is_complete[row] else None)
    return found


def kept_by_transformers(logits: torch.Tensor, params: SamplingParams) -> list[int]:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None].double())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    found: list[int] = scores[0].isfinite().nonzero().flatten().tolist()
    return found


@given(batch=st.lists(options(), min_size=1, max_size=6), seed=st.integers(0, 50))
def test_a_batch_keeps_what_transformers_keeps_of_each_row(batch: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(batch), NUM_LOGITS, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [kept_by_transformers(logits[row], params) for row, params in enumerate(batch)]
    assert kept(logits, batch, NUM_LOGITS) == expected


@given(batch=st.lists(options(), min_size=1, max_size=6), seed=st.integers(0, 50), num_candidates=st.integers(1, 39))
def test_equal_logits_are_kept_by_id_and_few_candidates_are_enough_or_told_not_to_be(
    batch: list[SamplingParams], seed: int, num_candidates: int
) -> None:
    """Logits of a coarse grid have many ties; what is complete with few candidates is what all of them give, to the bit."""
    logits = torch.randn(len(batch), NUM_LOGITS, generator=torch.Generator().manual_seed(seed)).mul(2).round().div(2)
    rows = [row.tolist() for row in logits]
    expected = [sampling_oracle.kept(row, params) for row, params in zip(rows, batch, strict=True)]
    assert kept(logits, batch, NUM_LOGITS) == expected
    found = kept(logits, batch, num_candidates)
    # Min-p comes last: it may drop again what made more candidates necessary.
    before = [sampling_oracle.kept(row, replace(params, min_p=0.0)) for row, params in zip(rows, batch, strict=True)]
    for row, params in enumerate(batch):
        top_k = min(params.top_k or NUM_LOGITS, NUM_LOGITS)
        may_need_more = len(before[row]) > num_candidates or num_candidates < top_k < NUM_LOGITS
        assert found[row] == (None if may_need_more and found[row] is None else expected[row])
    limits = TruncationLimits.of(batch, NUM_LOGITS, logits.device)
    few, whole = truncate(logits, limits, num_candidates), truncate(logits, limits, NUM_LOGITS)
    for row in few.is_complete.nonzero()[:, 0].tolist():
        assert torch.equal(few.ids[row], whole.ids[row, :num_candidates])
        assert torch.equal(few.weights[row], whole.weights[row, :num_candidates])


def test_the_best_are_in_one_order() -> None:
    """By logit, then by id: zeros of both signs are equal, and infinities have their place."""
    infinity, tiny = float("inf"), 1e-30
    row = [0.0, -1.0, -0.0, infinity, -infinity, 2.0, -tiny, tiny, 2.0, -1.0, -infinity]
    order = [3, 5, 8, 7, 0, 2, 6, 1, 9, 4, 10]
    for count in (1, 4, len(row)):
        for find in (best, best_on_device):
            assert find(torch.tensor([row, row]), count).tolist() == [order[:count]] * 2


@given(
    num_rows=st.integers(1, 4),
    vocab_size=st.integers(40, 700),
    count=st.integers(1, 20),
    grid=st.sampled_from([0.0, 0.5, 4.0, 1000.0]),
    share_excluded=st.sampled_from([0.0, 0.5, 0.99]),
    is_sorted=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_the_best_of_many_are_those_of_a_stable_sort(
    num_rows: int, vocab_size: int, count: int, grid: float, share_excluded: float, is_sorted: bool, seed: int
) -> None:
    """All tokens, and few of many, found by a threshold: with ties, equal logits, −inf, and all large ones in one place."""
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=numbers).mul(grid).round()
    logits[torch.rand(num_rows, vocab_size, generator=numbers) < share_excluded] = float("-inf")
    if is_sorted:
        logits = logits.sort(dim=-1).values
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    for find in (best, best_on_device):
        for number in (count, vocab_size):
            assert torch.equal(find(logits, number), expected[:, :number])
    largest, tokens = most_likely(logits)
    assert tokens == expected[:, 0].tolist()
    assert largest == logits.amax(dim=-1).tolist()
