"""The sampler as a whole: its order, one row's independence of the others, its numbers, and log-probabilities."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kvpool.worker_service.model.sampling import choice
from kvpool.worker_service.model.sampling.adjustment import Draw
from kvpool.worker_service.model.sampling.choice import draw_exactly, uniforms
from kvpool.worker_service.model.sampling.sampler import prompt_logprobs, sample
from kvpool.worker_service.step import BadLogits, SampledToken, SamplingParams
from tests.model import sampling_oracle
from tests.model.sampling_oracle import Row, uniform

VOCAB_SIZE = 50

PLAIN: Any = {"logit_bias": {}, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Options that leave the logits as they are."""


def random_rows(count: int, seed: int = 5) -> list[Row]:
    """All options mixed: rows with none, some and all of them."""
    numbers = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [numbers.randrange(VOCAB_SIZE) for _ in range(numbers.randrange(most + 1))]

    return [
        Row(
            SamplingParams(
                temperature=numbers.choice([0.0, 0.3, 1.0, 2.5]),
                top_k=numbers.choice([0, 0, 1, 5, VOCAB_SIZE, 1000]),
                top_p=numbers.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
                min_p=numbers.choice([0.0, 0.0, 0.01, 0.3]),
                repetition_penalty=numbers.choice([1.0, 1.0, 1.5]),
                presence_penalty=numbers.choice([0.0, 0.0, 1.0]),
                frequency_penalty=numbers.choice([0.0, 0.0, -0.5]),
                logit_bias={token: numbers.choice([-8.0, 8.0]) for token in tokens(2)},
                seed=numbers.choice([0, 1, 2**64 - 1, numbers.randrange(2**64)]),
            ),
            prompt=tokens(20),
            generated=tokens(20),
            banned_ids=sorted(set(tokens(1))),
            position=numbers.randrange(10000),
        )
        for _ in range(count)
    ]


def random_logits(count: int) -> torch.Tensor:
    """Of a grid of quarters, as bfloat16 has them: many are equal."""
    logits = torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3
    return logits.mul(4).round().div(4)


def good(logits: torch.Tensor, draws: list[Draw]) -> list[SampledToken]:
    """What is sampled of rows none of which is bad."""
    sampled = [token for token in sample(logits, draws) if isinstance(token, SampledToken)]
    assert len(sampled) == len(draws)
    return sampled


def tokens_of(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [token.token_id for token in good(logits, [row.draw() for row in rows])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_oracle_in_one_batch_and_alone(dtype: torch.dtype) -> None:
    """The logits stay as they were: others may want their log-probabilities."""
    rows, logits = random_rows(400), random_logits(400).to(dtype)
    before = logits.clone()
    together = tokens_of(logits, rows)
    assert torch.equal(logits, before)
    assert together == [sampling_oracle.sampled(values.tolist(), row) for values, row in zip(logits, rows, strict=True)]
    assert together == [tokens_of(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("num_candidates", "max_weights"), [((256,), 1 << 22), ((4, 11), 1 << 22), ((1, 2, 40), 7 * VOCAB_SIZE)]
)
def test_exact_sums_equal_the_oracle(
    num_candidates: tuple[int, ...], max_weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. Few candidates, so that many rows are looked at whole, and small slices of rows change nothing."""
    monkeypatch.setattr(choice, "NUM_CANDIDATES", num_candidates)
    monkeypatch.setattr(choice, "MAX_WEIGHTS", max_weights)
    rows = [
        Row(replace(row.params, **PLAIN), position=row.position)
        for row in random_rows(400)
        if row.params.temperature > 0
    ]
    logits = random_logits(len(rows))
    numbers = [uniform(row.params.seed, row.position) for row in rows]
    tokens = draw_exactly(logits, [row.params for row in rows], numbers)
    assert tokens == [sampling_oracle.sampled(values.tolist(), row) for values, row in zip(logits, rows, strict=True)]


LAST_WORD = 2**64 - 1


@given(st.lists(st.tuples(st.integers(0, LAST_WORD), st.integers(0, LAST_WORD - 1)), min_size=1, max_size=80))
@example([(LAST_WORD, LAST_WORD - 1)] * 3)
@example([(seed, position) for seed in (0, 1, 2**32, 2**63, LAST_WORD) for position in range(100)])
def test_the_numbers_of_a_batch_are_those_of_numpys_generator(rows: list[tuple[int, int]]) -> None:
    assert uniforms(*zip(*rows, strict=True)) == [uniform(seed, position) for seed, position in rows]


def test_the_number_of_a_seed_and_a_position_never_changes() -> None:
    """Whatever numpy does: the texts of a seed were published."""
    assert uniforms([42], [7]) == [0.4074136540795371]


@pytest.mark.parametrize(("seed", "position"), [(LAST_WORD + 1, 0), (0, LAST_WORD), (-1, 0), (0, -2)])
def test_a_seed_that_is_no_word_is_refused(seed: int, position: int) -> None:
    """It would change the numbers of the rows beside it."""
    with pytest.raises(OverflowError):
        uniforms([0, seed, 0], [0, position, 0])


def test_rows_of_a_large_vocabulary_are_drawn_as_alone() -> None:
    """More numbers than are computed at once, with and without truncation, and rows that keep more than the first candidates."""
    logits = torch.randn(6, 30_000, generator=torch.Generator().manual_seed(4)) * 2
    truncated: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.1}]
    truncated += [{"top_k": 300, "top_p": 0.9}, {"top_p": 0.2, "min_p": 0.01}]
    plain: list[dict[str, Any]] = [{}] * 6
    for kinds in (truncated, plain):
        draws = [Draw(SamplingParams(temperature=0.7, seed=seed, **kind), 9) for seed, kind in enumerate(kinds)]
        alone = [sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
        assert sample(logits, draws) == alone


class LargeOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is done with tensors as large as the logits."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self._size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = str(func) == "aten.detach.default"  # for numpy, which finds the largest logits
        if not is_view and any(isinstance(value, torch.Tensor) and value.numel() >= self._size for value in args):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_greedy_rows_cost_one_search_of_the_logits_also_next_to_a_row_with_options() -> None:
    """Such a row is taken out."""
    logits = random_logits(8)
    drawn = Row(SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0), [1], [2])
    for last, expected in ((Row(), []), (drawn, ["aten.index_select.default"])):
        draws = [row.draw() for row in [*[Row()] * 7, last]]
        with LargeOperations(logits.numel()) as operations:
            sample(logits, draws)
        assert operations.seen == expected


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    expected = torch.log_softmax(logits, -1)
    params = SamplingParams(2.0, top_k=3, seed=9, presence_penalty=2.0, logit_bias={7: 100.0})
    rows = [Row(replace(params, num_logprobs=count), [1, 2], [3, 3], banned_ids=[5]) for count in (None, 0, 4)]
    sampled = good(logits, [row.draw() for row in rows])
    assert [token.token_id for token in sampled] == [7, 7, 7]
    without, alone, with_top = (token.logprobs for token in sampled)
    assert without is None
    assert alone is not None
    assert alone.logprob == pytest.approx(float(expected[1, 7]))
    assert alone.top == []
    assert with_top is not None
    best = torch.sort(expected[2], descending=True, stable=True)
    assert [token for token, _ in with_top.top] == best.indices[:4].tolist()
    assert [value for _, value in with_top.top] == pytest.approx(best.values[:4].tolist())


def test_more_logprobs_than_tokens_are_all_tokens_with_ties_by_id() -> None:
    logprobs = good(torch.tensor([[1.0, 2.0, 1.0]]), [Draw(SamplingParams(num_logprobs=20), 0)])[0].logprobs
    assert logprobs is not None
    assert [token for token, _ in logprobs.top] == [1, 0, 2]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("bad", [[NAN], [INF], [INF, NAN], [-INF] * VOCAB_SIZE], ids=["nan", "inf", "both", "nothing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bad_row_is_told_of_and_its_neighbours_do_not_notice(bad: list[float], dtype: torch.dtype) -> None:
    """Every row once bad beside good ones, whatever its options: they get the bits that they get without it."""
    rows, logits = random_rows(40), random_logits(40).to(dtype)
    draws = [row.draw() for row in rows]
    draws = [draw._replace(sampling=replace(draw.sampling, num_logprobs=2)) for draw in draws]
    alone = good(logits, draws)
    for first in (0, 1):
        broken = logits.clone()
        broken[first::2, : len(bad)] = torch.tensor(bad, dtype=dtype)
        sampled = sample(broken, draws)
        assert sampled[1 - first :: 2] == alone[1 - first :: 2]
        for found, row in zip(sampled[first::2], rows[first::2], strict=True):
            assert isinstance(found, BadLogits)
            assert (found.position, found.is_adjusted) == (row.position, False)
            assert str(found.largest) == ("nan" if NAN in bad else str(max(bad)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize(
    ("logits", "adjustment", "largest"),
    [
        pytest.param([1.0, -INF, 2.0], Row(banned_ids=[0, 2]), -INF, id="all that the model leaves is banned"),
        pytest.param([1.0, 0.0, 2.0], Row(banned_ids=[0, 1, 2]), -INF, id="all is banned"),
        pytest.param(
            [1.0, 0.0, 2.0], Row(SamplingParams(logit_bias=dict.fromkeys(range(3), -INF))), -INF, id="an infinite bias"
        ),
        pytest.param([1.0, 0.0, 2.0], Row(SamplingParams(repetition_penalty=1e-44), generated=[2]), INF, id="overflow"),
    ],
)
def test_options_that_leave_nothing_to_draw_are_told_of(
    logits: list[float], adjustment: Row, largest: float, temperature: float, top_p: float
) -> None:
    params = replace(adjustment.params, temperature=temperature, top_p=top_p, num_logprobs=1)
    row = replace(adjustment, params=params, position=9)
    neighbour = Row(SamplingParams(temperature, top_p=top_p, presence_penalty=1.0, seed=4), generated=[1], position=9)
    both = torch.tensor([logits, [1.0, 0.0, 2.0]])
    bad, token = sample(both, [row.draw(), neighbour.draw()])
    assert bad == BadLogits(9, largest, is_adjusted=True)
    assert [token] == good(both[1:], [neighbour.draw()])


def test_a_row_in_which_one_token_is_left_is_good() -> None:
    logits = torch.full((1, 5), -INF)
    logits[0, 3] = -7.0
    for params in (SamplingParams(), SamplingParams(1.0, top_p=0.5), SamplingParams(1.0), SamplingParams(1.0, top_k=2)):
        assert tokens_of(logits, [Row(params)]) == [3]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_prompt_is_told_of_unless_one_of_its_rows_is_bad(bad: float) -> None:
    logits = random_logits(3)
    told = prompt_logprobs(logits, [1, 2, 3], 1, position=5)
    assert isinstance(told, list)
    assert [one.logprob for one in told] == torch.log_softmax(logits, -1)[[0, 1, 2], [1, 2, 3]].tolist()
    logits[1, 7] = bad
    found = prompt_logprobs(logits, [1, 2, 3], 1, position=5)
    assert isinstance(found, BadLogits)
    assert (found.position, str(found.largest), found.is_adjusted) == (6, str(bad), False)
