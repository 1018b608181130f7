"""The runner's contract towards the engine, next to computing the truth; logits are computed of the rows that are wanted alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.model.errors import UnsupportedModel
from kvpool.worker_service.model.forward.modules import RowSelector, modules_of
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.sampling.adjustment import Draw
from kvpool.worker_service.model.sampling.sampler import sample
from kvpool.worker_service.step import (
    BeamCandidates,
    BlockCopy,
    PartResult,
    PromptRows,
    SamplingParams,
    SequencePart,
    Step,
)
from kvpool.worker_service.token_counts import TokenCounts
from tests.model.paged import GREEDY, PLACES, PagedModel, Place, load
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("llama", tmp_path_factory.mktemp("llama")).path)


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


def test_the_draw_is_by_the_position_of_the_new_token(loaded: LoadedModel) -> None:
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


# -- rows whose logits are computed


class ScalingModel(torch.nn.Module):
    """A language model whose forward knows no logits_to_keep and scales behind its head."""

    def __init__(self, *, calls: int = 1, shape: tuple[int, ...] = (1, -1, 4)) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 6)
        self._calls = calls
        self._shape = shape
        self.rows_seen = 0

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = hidden[..., :1]
        for _ in range(self._calls):
            logits = self.head(hidden.view(self._shape))
        self.rows_seen = logits.shape[1]
        return SimpleNamespace(logits=logits * 2)


def test_rows_are_selected_before_the_head_and_what_comes_behind_it_is_done() -> None:
    model, hidden = ScalingModel(), torch.randn(1, 5, 4)
    everything = model(hidden).logits
    selector = RowSelector(model)
    with torch.inference_mode():
        for rows in ([4, 1], [], [2, 2, 0]):
            chosen = selector.run(torch.tensor(rows, dtype=torch.int64), hidden=hidden).logits
            assert model.rows_seen == len(rows)
            torch.testing.assert_close(chosen, everything[0, rows])
        assert model(hidden).logits.shape[1] == 5
    selector.close()
    assert not model.head._forward_pre_hooks


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_row_tells_whether_it_is_numbers_also_those_not_selected(bad: float, dtype: torch.dtype) -> None:
    hidden = torch.randn(1, 5, 4).to(dtype)
    hidden[0, 0] = 60_000
    hidden[0, 3, 2] = bad
    selector = RowSelector(ScalingModel().to(dtype))
    with torch.inference_mode():
        for rows in ([4, 1], []):
            selected = selector.run(torch.tensor(rows, dtype=torch.int64), hidden=hidden)
            assert selected.is_finite.tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (ScalingModel(calls=0), "0 times"),
        (ScalingModel(calls=2), "2 times"),
        (ScalingModel(shape=(-1, 4)), r"shapes \[\[5, 4\]\]"),
    ],
)
def test_a_model_that_uses_its_head_otherwise_is_refused(model: ScalingModel, complaint: str) -> None:
    """Its rows could not be told apart."""
    with pytest.raises(UnsupportedModel, match=complaint), torch.inference_mode():
        RowSelector(model).run(torch.tensor([4, 1]), hidden=torch.randn(1, 5, 4))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="has no output embeddings"):
        RowSelector(SimpleNamespace(get_output_embeddings=lambda: None))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "granite", "gpt_oss"])
def test_no_architecture_computes_logits_that_nobody_wants(architecture: str, tmp_path: Path) -> None:
    """A step of 20 tokens of which one is sampled and three tell of the prompt has four rows of logits; in the middle of a
    prefill there are none; slices are as small as was asked for."""
    loaded = load(make_tiny_model(architecture, tmp_path).path)
    runner = PagedModel(loaded).runner
    runner._max_prompt_rows = 2
    seen: list[int] = []
    head = modules_of(loaded.runtime).get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape[1]))
    greedy = SamplingParams()
    runner.execute(Step([SequencePart([1] * 9, 0, ([1, 2, 3],), None)]))
    assert seen == [0]
    rows = PromptRows(first=4, targets=[5, 6, 7], num_top=0)
    parts = [
        SequencePart([2] * 10, 0, ([4, 5, 6],), greedy),
        SequencePart([3] * 9, 0, ([7, 8, 9],), greedy, prompt_rows=rows),
        SequencePart([4], 9, ([1, 2, 3],), None),
    ]
    results = runner.execute(Step(parts))
    # Sampled and two of the prompt; then the last one of the prompt and, behind it, the token of that sequence.
    assert seen == [0, 3, 2]
    assert [result.token is None for result in results] == [False, False, True]
    assert [len(result.prompt_logprobs) for result in results] == [0, 3, 0]


# -- several continuations of one text: blocks that are copied, tokens drawn from one row, candidates of beams


PROMPT = list(range(3, 13))
"""Two full blocks and half of a third one."""
PROMPT_BLOCKS = [1, 2, 3]


@pytest.fixture(scope="module", params=[pytest.param(place, marks=place.marks, id=str(place)) for place in PLACES])
def placed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    place: Place = request.param
    folder: Path = tmp_path_factory.mktemp("llama")
    return load(make_tiny_model("llama", folder).path, device=place.device, runtime=place.runtime)


def alone(paged: PagedModel, tokens: list[int], blocks: list[int], **part: Any) -> PartResult:
    """What follows these tokens, computed at once in blocks of their own."""
    (result,) = paged.runner.execute(Step([SequencePart(tokens, 0, (blocks,), GREEDY)._replace(**part)]))
    return result


def drawn(result: PartResult) -> tuple[int, float]:
    """Id and log-probability."""
    assert result.token is not None
    assert result.token.logprobs is not None
    return result.token.token_id, result.token.logprobs.logprob


def candidates(result: PartResult) -> BeamCandidates:
    assert result.candidates is not None
    return result.candidates


def test_a_fork_goes_on_as_if_it_had_computed_its_text_itself(placed: LoadedModel) -> None:
    paged = PagedModel(placed)
    alone(paged, PROMPT, PROMPT_BLOCKS)
    parent = SequencePart([20], len(PROMPT), (PROMPT_BLOCKS,), GREEDY)
    fork = SequencePart([30], len(PROMPT), ([1, 2, 4],), GREEDY)
    results = paged.runner.execute(Step([parent, fork], copies=[BlockCopy(0, source=3, target=4)]))
    for result, token, blocks in zip(results, (20, 30), ([5, 6, 7], [8, 9, 10]), strict=True):
        assert drawn(result) == pytest.approx(drawn(alone(paged, [*PROMPT, token], blocks)), abs=1e-5)


def test_a_copy_of_a_copy_has_what_the_first_one_had(placed: LoadedModel) -> None:
    paged = PagedModel(placed)
    alone(paged, PROMPT, PROMPT_BLOCKS)
    chain = [BlockCopy(0, 3, 4), BlockCopy(0, 4, 5), BlockCopy(0, 1, 6), BlockCopy(0, 5, 7)]
    paged.runner.execute(Step([], copies=chain))
    tail, *copies = (paged.block_bytes([block]) for block in (3, 4, 5, 7))
    for copy in copies:
        assert all(
            torch.equal(one.view(torch.int32), own.view(torch.int32)) for one, own in zip(tail, copy, strict=True)
        )
    assert not torch.equal(paged.block_bytes([6])[0], tail[0])


def test_tokens_of_forks_are_those_that_requests_alone_would_draw(placed: LoadedModel) -> None:
    paged = PagedModel(placed)
    ways = [SamplingParams(temperature=1.5, seed=seed, num_logprobs=2) for seed in range(6)]
    expected = [alone(paged, PROMPT, PROMPT_BLOCKS, sampling=way).token for way in ways]
    found = alone(paged, PROMPT, [4, 5, 6], sampling=ways[0], forks=ways[1:])
    assert [found.token, *found.forks] == expected
    assert len({token.token_id for token in expected if token is not None}) > 1


def test_candidates_are_the_best_adjusted_log_probabilities(placed: LoadedModel) -> None:
    """With the processors of transformers, which beam search applies to log-probabilities."""
    paged = PagedModel(placed)
    logits = paged.runner.logits([SequencePart(PROMPT, 0, (PROMPT_BLOCKS,), None)])[-1].cpu()
    raw = torch.log_softmax(logits, dim=-1)
    banned = raw.topk(2).indices.tolist()
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty=1.7),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), min_new_tokens=1, eos_token_id=banned),
        ]
    )
    scores = processors(torch.tensor([PROMPT]), raw[None].clone())[0]
    found = alone(
        paged,
        PROMPT,
        PROMPT_BLOCKS,
        sampling=SamplingParams(repetition_penalty=1.7, num_logprobs=3),
        counts=TokenCounts(PROMPT),
        banned_ids=banned,
        num_candidates=8,
    )
    assert found.token is None
    best, ours = scores.topk(8), candidates(found).best
    assert [one.token_id for one in ours] == best.indices.tolist()
    assert [one.score for one in ours] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [one.logprob for one in ours] == pytest.approx(raw[best.indices].tolist(), abs=1e-5)
    assert [token_id for token_id, _ in candidates(found).top] == raw.topk(3).indices.tolist()


def test_a_step_has_samples_candidates_and_chunks_side_by_side(placed: LoadedModel) -> None:
    paged = PagedModel(placed)
    beam = SequencePart(PROMPT, 0, (PROMPT_BLOCKS,), GREEDY, num_candidates=3)
    fork = SequencePart(PROMPT[::-1], 0, ([4, 5, 6],), GREEDY, forks=[GREEDY])
    chunk = SequencePart([5, 6], 0, ([7],), None)
    together = paged.runner.execute(Step([chunk, beam, fork]))
    assert together[0] == PartResult(None, [])
    best = candidates(together[1]).best
    assert len(best) == 3
    assert best[0].token_id == drawn(alone(paged, PROMPT, [8, 9, 10]))[0]
    assert together[2].token == together[2].forks[0]


def test_all_tokens_are_candidates_of_a_small_vocabulary(placed: LoadedModel) -> None:
    best = candidates(alone(PagedModel(placed), PROMPT, PROMPT_BLOCKS, num_candidates=1000)).best
    assert len({one.token_id for one in best}) == len(best) == 264
