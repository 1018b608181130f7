"""Top-k, top-p and min-p: what transformers' own processors keep of the same logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.model.sampling.ranking import best, best_on_device, most_likely
from kvpool.worker_service.model.sampling.truncation import TruncationLimits, truncate, weigh
from tests.model import sampling_oracle

VOCAB_SIZE = 40


@st.composite
def options(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.3, 0.7, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, VOCAB_SIZE - 1, VOCAB_SIZE, 1000])),
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
    logits = torch.randn(len(batch), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [kept_by_transformers(logits[row], params) for row, params in enumerate(batch)]
    assert kept(logits, batch, VOCAB_SIZE) == expected


@given(batch=st.lists(options(), min_size=1, max_size=6), seed=st.integers(0, 50), num_candidates=st.integers(1, 39))
def test_equal_logits_are_kept_by_id_and_few_candidates_are_enough_or_told_not_to_be(
    batch: list[SamplingParams], seed: int, num_candidates: int
) -> None:
    """Logits of a coarse grid have many ties; what is complete with few candidates is what all of them give, to the bit."""
    logits = torch.randn(len(batch), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).mul(2).round().div(2)
    rows = [row.tolist() for row in logits]
    expected = [sampling_oracle.kept(row, params) for row, params in zip(rows, batch, strict=True)]
    assert kept(logits, batch, VOCAB_SIZE) == expected
    found = kept(logits, batch, num_candidates)
    # Min-p comes last: it may drop again what made more candidates necessary.
    before = [sampling_oracle.kept(row, replace(params, min_p=0.0)) for row, params in zip(rows, batch, strict=True)]
    for row, params in enumerate(batch):
        top_k = min(params.top_k or VOCAB_SIZE, VOCAB_SIZE)
        may_need_more = len(before[row]) > num_candidates or num_candidates < top_k < VOCAB_SIZE
        assert found[row] == (None if may_need_more and found[row] is None else expected[row])
    limits = TruncationLimits.of(batch, VOCAB_SIZE, logits.device)
    few, whole = truncate(logits, limits, num_candidates), truncate(logits, limits, VOCAB_SIZE)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_best_are_those_of_a_stable_sort(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 500, generator=torch.Generator().manual_seed(2)) * 2).to(dtype).float()
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    for find in (best, best_on_device):
        assert torch.equal(find(logits, 500), expected)
        assert torch.equal(find(logits, 37), expected[:, :37])


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
    """Few of many tokens, found by a threshold: with ties, equal logits, −inf, and all large ones in one place."""
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=numbers).mul(grid).round()
    logits[torch.rand(num_rows, vocab_size, generator=numbers) < share_excluded] = float("-inf")
    if is_sorted:
        logits = logits.sort(dim=-1).values
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(best(logits, count), expected[:, :count])
    assert torch.equal(best_on_device(logits, count), expected[:, :count])
    largest, tokens = most_likely(logits)
    assert tokens == expected[:, 0].tolist()
    assert largest == logits.amax(dim=-1).tolist()
