"""Models with recurrent layers over blocks of states equal transformers' generate in float32, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.engine.step import PromptRows, SequencePart, StateBlocks, Step
from kvpool.worker_service.model.forward.modules import ModulesRuntime
from kvpool.worker_service.model.load import LoadedModel
from tests.model.paged import BLOCK_SIZE, GREEDY, NEVER, PagedModel, Place, Request, load, quiet
from tests.model.test_model_truth import assert_true
from tests.tiny_models import MAX_MODEL_LEN, MIN_MARGIN, STATE_ARCHITECTURES, Oracle, TinyModel, make_tiny_model

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

CPU = Place("cpu", "torch")
FORGETFUL = {"jamba", "mamba"}
"""Their scans begin with zeros when they get several tokens."""
LONG = 2
"""The prompt of 41 tokens; the next one shares its first 20."""
SHARED = 20


@dataclass
class Subject:
    tiny: TinyModel
    loaded: LoadedModel

    @cached_property
    def truth(self) -> list[tuple[list[int], torch.Tensor]]:
        """Per prompt: tokens and logits."""
        oracle = Oracle.of(self.tiny.path)
        return [oracle.logits(prompt, self.tiny.num_new_tokens) for prompt in self.tiny.prompts]

    def requests(self, paged: PagedModel) -> list[Request]:
        return [paged.request(prompt, self.tiny.num_new_tokens) for prompt in self.tiny.prompts]

    def check(self, requests: list[Request]) -> None:
        for request, truth in zip(requests, self.truth, strict=True):
            assert_true(request, truth, CPU)


@pytest.fixture(scope="module", params=[*STATE_ARCHITECTURES, "jamba token by token"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    architecture, _, serial = request.param.partition(" ")
    tiny = make_tiny_model(architecture, tmp_path_factory.mktemp(architecture))
    loaded = load(tiny.path, max_model_len=MAX_MODEL_LEN)
    if serial:
        assert isinstance(loaded.runtime, ModulesRuntime)
        mixers = [mixer._replace(scan=None) for mixer in loaded.runtime.mixers]
        assert all(mixer.is_serial for mixer in mixers)
        loaded = replace(loaded, runtime=replace(loaded.runtime, mixers=mixers))
    return Subject(tiny, loaded)


def states_of(paged: PagedModel, block: int) -> list[torch.Tensor]:
    states = paged.runner.kv_cache.states
    assert states is not None
    return [tensor[block].clone() for tensor in states]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one, other)


def assert_close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_oracle_is_beyond_doubt_and_varies(subject: Subject) -> None:
    for tokens, logits in subject.truth:
        best = logits.topk(2, dim=-1).values
        assert float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN
        assert len(set(tokens)) >= 6


def test_who_forgets_is_found_by_what_it_computes(subject: Subject) -> None:
    mixers = subject.loaded.runtime.mixers
    assert mixers
    assert {mixer.forgets for mixer in mixers} == {subject.tiny.architecture in FORGETFUL}


@pytest.mark.parametrize("chunk", [NEVER, 7, 16])
def test_each_prompt_alone_equals_generate(subject: Subject, chunk: int) -> None:
    paged = PagedModel(subject.loaded)
    requests = subject.requests(paged)
    for request in requests:
        paged.run([request], chunk)
    subject.check(requests)


@pytest.mark.parametrize(("chunk", "stagger"), [(NEVER, 0), (7, 0), (16, 2), (7, 2), (1, 3)])
def test_batched_chunked_and_mixed_equals_generate(subject: Subject, chunk: int, stagger: int) -> None:
    """Chunks, single tokens of several sequences at once, and both in one step."""
    paged = PagedModel(subject.loaded)
    requests = subject.requests(paged)
    paged.run(requests, chunk, stagger)
    subject.check(requests)


def test_requests_that_go_on_from_a_snapshot_equal_generate_and_leave_it_as_it_is(subject: Subject) -> None:
    """Two at once, one of them with another end, and later a third."""
    paged, (tiny, truths) = PagedModel(subject.loaded), (subject.tiny, subject.truth)
    first = paged.request(tiny.prompts[LONG], tiny.num_new_tokens)
    snapshot = first.snapshots[SHARED] = paged.state_block()
    paged.run([first], chunk=16)
    assert_true(first, truths[LONG], CPU)
    kept, shared = states_of(paged, snapshot), first.table[: SHARED // BLOCK_SIZE]
    sharers = [
        paged.request(tiny.prompts[LONG], tiny.num_new_tokens, shared, source=snapshot),
        paged.request(tiny.prompts[LONG + 1], tiny.num_new_tokens, shared, source=snapshot),
    ]
    paged.run(sharers, chunk=7, stagger=1)
    late = paged.request(tiny.prompts[LONG], tiny.num_new_tokens, shared, source=snapshot)
    paged.run([late])
    for request, truth in zip([*sharers, late], (truths[LONG], truths[LONG + 1], truths[LONG]), strict=True):
        assert_true(request, truth, CPU)
    assert_same(kept, states_of(paged, snapshot))


def test_the_snapshot_is_what_is_read(subject: Subject) -> None:
    """Another state gives another result: the prefix is not recomputed behind our back."""
    paged, tiny = PagedModel(subject.loaded), subject.tiny
    first = paged.request(tiny.prompts[LONG], tiny.num_new_tokens)
    snapshot = first.snapshots[SHARED] = paged.state_block()
    paged.run([first])
    assert paged.runner.kv_cache.states is not None
    for tensor in paged.runner.kv_cache.states:
        tensor[snapshot] = tensor[snapshot].flip(0) + 100.0
    sharer = paged.request(tiny.prompts[LONG], 1, first.table[: SHARED // BLOCK_SIZE], source=snapshot)
    paged.run([sharer])
    assert abs(sharer.logprobs[0] - first.logprobs[0]) > 1e-2


def test_a_snapshot_is_the_state_after_exactly_its_tokens(subject: Subject) -> None:
    """As if the text ended there, however it was cut before."""
    paged, tiny = PagedModel(subject.loaded), subject.tiny
    whole = paged.request(tiny.prompts[LONG], 1)
    cut = paged.request(tiny.prompts[LONG], 1)
    ends = paged.request(tiny.prompts[LONG][:SHARED], 1)
    for request in (whole, cut):
        request.snapshots[SHARED] = paged.state_block()
    paged.run([whole])
    paged.run([cut], chunk=3)
    paged.run([ends])
    found = states_of(paged, whole.snapshots[SHARED])
    assert_close(found, states_of(paged, cut.snapshots[SHARED]))
    assert_close(found, states_of(paged, ends.running))


def test_who_is_computed_again_after_a_preemption_equals_generate(subject: Subject) -> None:
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
    subject.check(requests)


def test_log_probabilities_of_a_prompt_in_several_passes_go_on_from_the_running_state(subject: Subject) -> None:
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


def test_a_state_that_is_not_finite_is_reported(subject: Subject) -> None:
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
    assert first.token.token_id == subject.truth[0][0][1]
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
