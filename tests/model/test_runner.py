"""The runner's contract towards the engine, beside computing the truth."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.engine.sampling_params import SamplingParams
from kvpool.worker_service.engine.step import PartResult, PromptRows, SequencePart, Step
from kvpool.worker_service.engine.token_counts import TokenCounts
from kvpool.worker_service.model.forward.modules import modules_of
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.sampling.draw import Draw
from kvpool.worker_service.model.sampling.sampler import sample
from tests.model.paged import GREEDY, PagedModel, load
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("llama", tmp_path_factory.mktemp("llama")).path)


def test_an_empty_step_does_nothing(loaded: LoadedModel) -> None:
    assert PagedModel(loaded).runner.execute(Step([])) == []


def test_parts_without_sampling_get_nothing(loaded: LoadedModel) -> None:
    runner = PagedModel(loaded).runner
    assert runner.execute(Step([SequencePart([1, 2], 0, ([1],), None)])) == [PartResult(None, [])]
    first, second = runner.execute(Step([SequencePart([3], 2, ([1],), None), SequencePart([5], 0, ([2],), GREEDY)]))
    assert first.token is None
    assert second.token is not None


def test_a_bad_part_is_refused_before_anything_is_written(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded, num_blocks=8)
    good = SequencePart([1, 2, 3], 0, ([1],), GREEDY)
    for bad in (
        SequencePart([1] * 5, 0, ([2],), None),
        SequencePart([1], 0, ([8],), None),
        SequencePart([1], 0, ([0],), None),
    ):
        with pytest.raises(PackingError):
            paged.runner.execute(Step([good, bad]))
    assert all(block.isnan().all() for block in paged.block_bytes(range(1, 8)))


def test_the_null_block_is_never_written(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded)
    paged.run([paged.request(range(1, 12), 5), paged.request([3], 9)], chunk=4)
    assert not any(block.any() for block in paged.block_bytes([0]))


def test_random_sampling_does_not_depend_on_the_batch(loaded: LoadedModel) -> None:
    """The same seed gives the same text alone, beside others, and in chunks; another seed gives another."""
    sampling = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, seed=5)
    paged = PagedModel(loaded)
    alone = paged.request(range(20), 12, sampling=sampling)
    paged.run([alone])
    beside = [paged.request(range(20), 12, sampling=sampling), paged.request(range(7), 12), paged.request([9] * 30, 12)]
    paged.run(beside, chunk=7, stagger=1)
    assert beside[0].token_ids == alone.token_ids
    other = paged.request(range(20), 12, sampling=SamplingParams(temperature=1.0, seed=6))
    paged.run([other])
    assert other.token_ids != alone.token_ids


def test_the_draw_is_by_the_position_of_the_new_token(loaded: LoadedModel) -> None:
    """A prompt of n tokens is followed by the token at position n, also when its last tokens come in a chunk."""
    runner, sampling = PagedModel(loaded).runner, SamplingParams(temperature=2.0, seed=5)
    for length in range(2, 12):
        prompt = list(range(length))
        logits = runner.logits([SequencePart(prompt, 0, ([1, 2, 3],), None)])[-1:]
        expected = sample(logits, [Draw(sampling, position=length)])
        cut = length // 2
        runner.execute(Step([SequencePart(prompt[:cut], 0, ([4, 5, 6],), None)]))
        (result,) = runner.execute(Step([SequencePart(prompt[cut:], cut, ([4, 5, 6],), sampling)]))
        assert [result.token] == expected


BAD_TOKEN = 250


@pytest.fixture(params=[float("nan"), float("inf")], ids=str)
def spoilt(loaded: LoadedModel, request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """The model with one token whose embedding no layer can compute with."""
    row = modules_of(loaded.runtime).get_input_embeddings().weight.data[BAD_TOKEN]
    before = row.clone()
    row.fill_(request.param)
    yield loaded
    row.copy_(before)


def test_a_sequence_without_numbers_changes_no_bit_of_its_neighbours(spoilt: LoadedModel) -> None:
    """Beside one that decodes, a prompt that is told of, and one that is sampled at random; in one pass and in several."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3, num_logprobs=2, presence_penalty=0.5)
    counts = TokenCounts([1, 2, 3], [])
    good = [
        SequencePart([1, 2, 3], 0, ([1],), sampling, counts=counts),
        SequencePart([7], 4, ([2, 3],), GREEDY),
        SequencePart([4, 5, 6, 7], 0, ([4],), GREEDY, prompt_rows=PromptRows(0, [5, 6, 7], 2)),
    ]
    bad = [
        SequencePart([5, BAD_TOKEN, 6], 0, ([5],), GREEDY),
        SequencePart([1, 2, BAD_TOKEN, 3], 0, ([6],), None, prompt_rows=PromptRows(0, [2, BAD_TOKEN, 3, 9], 1)),
    ]
    for max_prompt_rows in (100, 2):
        runner = PagedModel(spoilt).runner
        runner._max_prompt_rows = max_prompt_rows
        runner.execute(Step([SequencePart([9, 8, 7, 6], 0, ([2],), None)]))
        expected = runner.execute(Step(good))
        assert all(result.bad_logits is None for result in expected)
        runner.kv_cache.fill(float("nan"))
        runner.execute(Step([SequencePart([9, 8, 7, 6], 0, ([2],), None)]))
        results = runner.execute(Step([good[0], bad[0], *good[1:], bad[1]]))
        assert [results[0], *results[2:4]] == expected
        sampled, told = results[1].bad_logits, results[4].bad_logits
        assert sampled is not None
        assert told is not None
        assert sampled.position == 3
        # In one chunk its own earlier rows are lost too: 0 times a masked value that is NaN is NaN.
        assert told.position == (1 if max_prompt_rows == 100 else 2)
        assert [results[1], results[4]] == [PartResult(bad_logits=sampled), PartResult(bad_logits=told)]


def test_rows_without_numbers_are_told_of_where_no_logits_are_wanted(spoilt: LoadedModel) -> None:
    """In the middle of a prefill, beside others in whose middle nothing is wrong; of a later chunk, the earlier one stays."""
    runner = PagedModel(spoilt).runner
    good, bad = SequencePart([1, 2, 3], 0, ([1],), None), SequencePart([4, 5, BAD_TOKEN, 6], 4, ([2, 3],), None)
    results = runner.execute(Step([SequencePart([9, 8, 7, 6], 0, ([2],), None), good]))
    assert results == [PartResult(None, [])] * 2
    results = runner.execute(Step([good._replace(block_tables=([4],)), bad, good]))
    assert results[0] == results[2] == PartResult(None, [])
    told = results[1].bad_logits
    assert told is not None
    # As above, its own earlier rows in the same chunk may be lost too.
    assert told.position in (5, 6, 7)
    assert math.isnan(told.largest)
    assert results[1] == PartResult(bad_logits=told)
