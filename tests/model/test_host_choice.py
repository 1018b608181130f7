"""The choice in numpy, by sums of blocks: the same tokens as by sums of all tokens in one order, or no decision."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.worker_service.model.sampling.adjustment import Draw
from kvpool.worker_service.model.sampling.choice import draw_exactly, draw_tokens
from kvpool.worker_service.model.sampling.host_choice import choose
from kvpool.worker_service.model.sampling.truncation import TruncationLimits, weigh
from kvpool.worker_service.step import SamplingParams

VOCAB_SIZE = 3000
"""Many blocks, and more tokens than are looked at to estimate a weight."""


def rows_of(count: int, seed: int, scale: float = 2.0, peak: float = 8.0) -> torch.Tensor:
    """Logits of a few likely tokens and many unlikely ones."""
    numbers = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB_SIZE, generator=numbers) * scale
    logits[:, 7::300] += torch.linspace(peak, 0.0, 10)
    return logits


def num_certain(logits: torch.Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> int:
    """Number of decided rows, all of them decided as by the exact choice."""
    tokens, is_certain = choose(logits.numpy(), range(len(logits)), params, numbers)
    exact = np.array(draw_exactly(logits, params, numbers))
    assert tokens[is_certain].tolist() == exact[is_certain].tolist()
    return int(is_certain.sum())


@st.composite
def options(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([1e-44, 1e-30, 0.01, 0.3, 0.8, 1.0, 2.5, 100.0])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 40, 300, VOCAB_SIZE - 1, VOCAB_SIZE])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.01])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-6, 0.05, 1.0])),
    )


@given(
    batch=st.lists(options(), min_size=1, max_size=8),
    numbers=st.lists(st.floats(0.0, 1 - 2**-53), min_size=8, max_size=8),
    scale=st.sampled_from([0.0, 0.5, 2.0, 5.0]),
    grid=st.sampled_from([None, 1.0, 4.0]),
    share_excluded=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 1 << 16),
)
def test_what_is_decided_is_decided_as_by_exact_sums(
    batch: list[SamplingParams],
    numbers: list[float],
    scale: float,
    grid: float | None,
    share_excluded: float,
    seed: int,
) -> None:
    """All options mixed, with few and many tokens kept, ties, and tokens that the model excludes."""
    logits = rows_of(len(batch), seed, scale)
    if grid is not None:
        logits = logits.mul(grid).round().div(grid)
    excluded = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < share_excluded
    excluded[:, 7] = False
    logits[excluded] = float("-inf")
    num_certain(logits, batch, numbers[: len(batch)])


@pytest.mark.parametrize("temperature", [0.8, 2.0])
def test_numbers_at_the_ends_of_tokens_are_not_decided_by_rounded_sums(temperature: float) -> None:
    """Each number is the share at which a token ends. The next ones are decided, if the token is not too small."""
    logits = rows_of(1, 3)
    params = SamplingParams(temperature=temperature)
    cumulative = weigh(logits, TruncationLimits.of([params], VOCAB_SIZE, logits.device)).cumsum(dim=-1)[0]
    ends = (cumulative / cumulative[-1])[:-1].tolist()
    many = logits.expand(len(ends), -1).contiguous()
    assert num_certain(many, [params] * len(ends), ends) == 0
    likely = cumulative.diff().topk(5).indices.tolist()
    assert num_certain(many[:5], [params] * 5, [(ends[token] + ends[token + 1]) / 2 for token in likely]) == 5


@pytest.mark.parametrize("temperature", [0.8, 2.0])
def test_shares_at_the_ends_of_tokens_are_not_decided_by_rounded_sums(temperature: float) -> None:
    """Each top-p is the share of the most likely tokens, from one to hundreds."""
    logits = rows_of(1, 4)
    weights = torch.exp((logits[0].double() - logits.max()) / temperature)
    shares = (weights.sort(descending=True).values.cumsum(0) / weights.sum())[:400].tolist()
    params = [SamplingParams(temperature=temperature, top_p=share) for share in shares]
    many = logits.expand(len(shares), -1).contiguous()
    assert num_certain(many, params, [1 - 2**-53] * len(shares)) == 0
    between = [SamplingParams(temperature=temperature, top_p=(a + b) / 2) for a, b in pairwise(shares[:6])]
    assert num_certain(many[:5], between, [1 - 2**-53] * 5) == 5


@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.95}, {"top_p": 0.95, "min_p": 0.01}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.02}]
)
def test_nearly_all_rows_are_decided(options: dict[str, Any], temperature: float) -> None:
    """Also where the unlikely tokens have most of the weight, so that float32 alone would leave many rows."""
    logits, numbers = rows_of(64, 5), torch.rand(64, generator=torch.Generator().manual_seed(5)).tolist()
    assert num_certain(logits, [SamplingParams(temperature=temperature, **options)] * 64, numbers) >= 60


def test_a_sample_without_the_likely_tokens_decides_nothing() -> None:
    """Of the tokens that are sampled only one has any weight, so all others seem to be droppable."""
    logits = torch.full((2, VOCAB_SIZE), 1.0)
    logits[:, ::6] = float("-inf")
    logits[:, 0] = 2.0
    assert num_certain(logits, [SamplingParams(temperature=1.0, top_p=0.9)] * 2, [0.3, 0.8]) == 0


def test_rows_that_are_not_decided_get_their_token_from_exact_sums() -> None:
    """Four equal tokens, half of them kept: which ones is a matter of equality."""
    logits = torch.full((3, 600), float("-inf"))
    logits[:, 100:104] = 1.0
    half = SamplingParams(temperature=1.0, top_p=0.5)
    assert num_certain(logits, [half] * 3, [0.1, 0.5, 0.9]) == 0
    tokens = draw_tokens(logits, [2, 0], [Draw(half, position) for position in range(2)])
    assert set(tokens) <= {100, 101}


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 7, "top_p": 0.5}])
def test_many_equal_tokens_are_drawn_from(options: dict[str, Any]) -> None:
    """The sums of so many may differ by more than the weight of a token."""
    num_certain(torch.zeros(2, 60_000), [SamplingParams(temperature=1.0, **options)] * 2, [0.3, 0.99])


def test_only_the_chosen_rows_are_looked_at() -> None:
    logits = rows_of(6, 6)
    draws = [Draw(SamplingParams(temperature=0.7, top_p=top_p, seed=3), 5) for top_p in (1.0, 0.9, 1.0)]
    expected = draw_tokens(logits[[4, 1, 3]], range(3), draws)
    logits[[0, 2, 5]] = float("nan")
    assert draw_tokens(logits, [4, 1, 3], draws) == expected
