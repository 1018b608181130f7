"""Several continuations of one text: blocks that are copied, tokens drawn from one row, candidates of beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import (
    BeamCandidates,
    BlockCopy,
    PartResult,
    SamplingParams,
    SequencePart,
    Step,
)
from kvpool.worker_service.token_counts import TokenCounts
from tests.model.paged import GREEDY, PLACES, PagedModel, Place, load
from tests.tiny_models import make_tiny_model

PROMPT = list(range(3, 13))
"""Two full blocks and half of a third one."""
PROMPT_BLOCKS = [1, 2, 3]


@pytest.fixture(scope="module", params=[pytest.param(place, marks=place.marks, id=str(place)) for place in PLACES])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
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


def test_a_fork_goes_on_as_if_it_had_computed_its_text_itself(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded)
    alone(paged, PROMPT, PROMPT_BLOCKS)
    parent = SequencePart([20], len(PROMPT), (PROMPT_BLOCKS,), GREEDY)
    fork = SequencePart([30], len(PROMPT), ([1, 2, 4],), GREEDY)
    results = paged.runner.execute(Step([parent, fork], copies=[BlockCopy(0, source=3, target=4)]))
    for result, token, blocks in zip(results, (20, 30), ([5, 6, 7], [8, 9, 10]), strict=True):
        assert drawn(result) == pytest.approx(drawn(alone(paged, [*PROMPT, token], blocks)), abs=1e-5)


def test_a_copy_of_a_copy_has_what_the_first_one_had(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded)
    alone(paged, PROMPT, PROMPT_BLOCKS)
    chain = [BlockCopy(0, 3, 4), BlockCopy(0, 4, 5), BlockCopy(0, 1, 6), BlockCopy(0, 5, 7)]
    paged.runner.execute(Step([], copies=chain))
    tail, *copies = (paged.block_bytes([block]) for block in (3, 4, 5, 7))
    for copy in copies:
        assert all(
            torch.equal(one.view(torch.int32), own.view(torch.int32)) for one, own in zip(tail, copy, strict=True)
        )
    assert not torch.equal(paged.block_bytes([6])[0], tail[0])


def test_tokens_of_forks_are_those_that_requests_alone_would_draw(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded)
    ways = [SamplingParams(temperature=1.5, seed=seed, num_logprobs=2) for seed in range(6)]
    expected = [alone(paged, PROMPT, PROMPT_BLOCKS, sampling=way).token for way in ways]
    found = alone(paged, PROMPT, [4, 5, 6], sampling=ways[0], forks=ways[1:])
    assert [found.token, *found.forks] == expected
    assert len({token.token_id for token in expected if token is not None}) > 1


def test_candidates_are_the_best_adjusted_log_probabilities(loaded: LoadedModel) -> None:
    """With the processors of transformers, which beam search applies to log-probabilities."""
    paged = PagedModel(loaded)
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


def test_a_step_has_samples_candidates_and_chunks_side_by_side(loaded: LoadedModel) -> None:
    paged = PagedModel(loaded)
    beam = SequencePart(PROMPT, 0, (PROMPT_BLOCKS,), GREEDY, num_candidates=3)
    fork = SequencePart(PROMPT[::-1], 0, ([4, 5, 6],), GREEDY, forks=[GREEDY])
    chunk = SequencePart([5, 6], 0, ([7],), None)
    together = paged.runner.execute(Step([chunk, beam, fork]))
    assert together[0] == PartResult(None, [])
    best = candidates(together[1]).best
    assert len(best) == 3
    assert best[0].token_id == drawn(alone(paged, PROMPT, [8, 9, 10]))[0]
    assert together[2].token == together[2].forks[0]


def test_all_tokens_are_candidates_of_a_small_vocabulary(loaded: LoadedModel) -> None:
    best = candidates(alone(PagedModel(loaded), PROMPT, PROMPT_BLOCKS, num_candidates=1000)).best
    assert len({one.token_id for one in best}) == len(best) == 264
