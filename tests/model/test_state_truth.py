"""Models with recurrent layers over blocks of states. test_truth.py has their texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.engine.step import PromptRows, SequencePart, StateBlocks, Step
from kvpool.worker_service.model.load import LoadedModel
from tests.model.paged import BLOCK_SIZE, GREEDY, PagedModel, load, quiet
from tests.model.truth.dense import LONG
from tests.model.truth.states import ARCHITECTURES, SHARED, States, make, states_of
from tests.model.truth.subject import Models
from tests.tiny_models import MAX_MODEL_LEN, make_tiny_model

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

FORGETFUL = {"jamba"}
"""Their scans begin with zeros when they get several tokens."""


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name != "falcon_h1"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> States:
    return make(request.param, False, Models(tmp_path_factory.mktemp))


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_who_forgets_is_found_by_what_it_computes(subject: States) -> None:
    mixers = subject.loaded.runtime.mixers
    assert mixers
    assert {mixer.forgets for mixer in mixers} == {subject.tiny.architecture in FORGETFUL}


def test_a_snapshot_is_the_state_after_exactly_its_tokens(subject: States) -> None:
    """As if the text ended there, however it was cut before, and whatever else begins in the same step."""
    paged, tiny = PagedModel(subject.loaded), subject.tiny
    other = paged.request(tiny.prompts[0][:1], 2)  # single tokens come first in a step
    whole = paged.request(tiny.prompts[LONG], 1)
    cut = paged.request(tiny.prompts[LONG], 1)
    ends = paged.request(tiny.prompts[LONG][:SHARED], 1)
    for request in (whole, cut):
        request.snapshots[SHARED] = paged.state_block()
    paged.run([whole, other])
    paged.run([cut], chunk=3)
    paged.run([ends])
    found = states_of(paged, whole.snapshots[SHARED])
    assert_close(found, states_of(paged, cut.snapshots[SHARED]))
    assert_close(found, states_of(paged, ends.running))


def test_who_is_computed_again_after_a_preemption_equals_generate(subject: States) -> None:
    """Generated tokens are then computed in chunks, in the blocks that they had: the old state is not read."""
    paged = PagedModel(subject.loaded)
    requests = subject.requests(paged)
    wanted = subject.tiny.num_new_tokens
    for request in requests:
        request.num_new = 5
    paged.run(requests, chunk=7, stagger=1)
    for request in requests:
        request.num_new = wanted
    paged.run(requests, chunk=16, stagger=2)
    subject.check(request.sampled for request in requests)


def test_log_probabilities_of_a_prompt_in_several_passes_go_on_from_the_running_state(subject: States) -> None:
    """And only the last piece is kept as a snapshot."""
    prompt = list(subject.tiny.prompts[LONG])
    rows = PromptRows(0, prompt[1:], num_top=1)
    found = []
    for max_prompt_rows in (64, 7):
        paged = PagedModel(subject.loaded)
        runner = paged.runner
        runner._max_prompt_rows = max_prompt_rows
        table = paged.request(prompt, 0).table
        part = SequencePart(
            prompt, 0, (table,) * len(runner.kv_cache.plan.groups), GREEDY, prompt_rows=rows, state=StateBlocks(0, 1, 2)
        )
        (result,) = runner.execute(Step([part]))
        assert result.token is not None
        assert_same(states_of(paged, 1), states_of(paged, 2))
        found.append([result.token.token_id, *(logprobs.logprob for logprobs in result.prompt_logprobs)])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_state_that_is_not_finite_is_reported(subject: States) -> None:
    """Its request ends, and its neighbour does not notice."""
    paged, tiny = PagedModel(subject.loaded), subject.tiny
    good, bad = (paged.request(prompt, 4) for prompt in tiny.prompts[:2])
    tables = len(paged.runner.kv_cache.plan.groups)
    parts = [
        SequencePart(list(request.prompt), 0, (request.table,) * tables, GREEDY, state=StateBlocks(0, request.running))
        for request in (good, bad)
    ]
    results = paged.runner.execute(Step(parts))
    assert paged.runner.kv_cache.states is not None
    for tensor in paged.runner.kv_cache.states:
        tensor[bad.running] = float("nan")
    parts = [
        SequencePart(
            [result.token.token_id],
            len(request.prompt),
            (request.table,) * tables,
            GREEDY,
            state=StateBlocks(request.running, request.running, paged.state_block()),
        )
        for request, result in zip((good, bad), results, strict=True)
        if result.token is not None
    ]
    first, second = paged.runner.execute(Step(parts))
    assert first.bad_logits is None
    assert first.token is not None
    assert first.token.token_id == subject.truths[0].tokens[1]
    assert second.bad_logits is not None


@pytest.mark.parametrize(
    ("states", "start", "message"),
    [
        ((None, StateBlocks(0, 2)), 0, "part 0 has no state"),
        ((StateBlocks(1, 1), StateBlocks(0, 2)), 0, "part 0 from position 0 goes on from the state in block 1"),
        ((StateBlocks(0, 1), StateBlocks(0, 2)), 4, "part 0 from position 4 goes on from the state in block 0"),
        ((StateBlocks(0, 0), StateBlocks(0, 2)), 0, "outside 1"),
        ((StateBlocks(0, 1, 64), StateBlocks(0, 2)), 0, "outside 1"),
        ((StateBlocks(0, 2), StateBlocks(0, 2)), 0, "block 2 is written twice"),
        ((StateBlocks(0, 1, 2), StateBlocks(0, 2)), 0, "block 2 is written twice"),
        ((StateBlocks(0, 1, 1), StateBlocks(0, 2)), 0, "block 1 is written twice"),
        ((StateBlocks(2, 1), StateBlocks(0, 2)), 4, "block 2, which the step overwrites"),
        ((StateBlocks(3, 1, 3), StateBlocks(0, 2)), 4, "block 3, which the step overwrites"),
    ],
)
def test_a_part_with_a_wrong_state_is_refused_before_anything_is_written(
    states: tuple[StateBlocks | None, ...], start: int, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    subject = _lfm2(tmp_path_factory)
    paged = PagedModel(subject)
    tables = [[1, 2], [3, 4]]
    parts = [
        SequencePart([5, 6], start if index == 0 else 0, (tables[index],), GREEDY, state=state)
        for index, state in enumerate(states)
    ]
    with pytest.raises(PackingError, match=message):
        paged.runner.execute(Step(parts))
    assert all(bool(tensor[1:].isnan().all()) for tensor in paged.runner.kv_cache.states or ())


_LOADED: list[LoadedModel] = []


def _lfm2(folders: pytest.TempPathFactory) -> LoadedModel:
    if not _LOADED:
        _LOADED.append(load(make_tiny_model("lfm2", folders.mktemp("lfm2")).path))
    return _LOADED[0]


def test_a_model_without_attention_needs_no_backend_that_runs_here(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("mamba2", tmp_path).path, max_model_len=MAX_MODEL_LEN)
    assert loaded.layers == []
    assert isinstance(loaded.attention_backend("flash", BLOCK_SIZE, quiet), TorchAttention)
