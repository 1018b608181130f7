"""What only one kind of KV has; test_truth.py has the texts of all."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvpool.worker_service.attention.layout import PackingError
from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.model.forward.native import NativeRuntime
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.model.memory.facts import kv_bytes_per_token
from kvpool.worker_service.model.memory.meta_model import build_meta_model
from kvpool.worker_service.model.settings import DTypeName, RuntimeName
from kvpool.worker_service.step import EncoderBlocks, PromptRows, SequencePart, StateBlocks, Step
from tests.model.paged import BLOCK_SIZE, GREEDY, NEEDS_PACKING, NEVER, PagedModel, load, quiet
from tests.model.ring_cache import Form, RingCache
from tests.model.truth.dense import LONG
from tests.model.truth.encoders import make as make_with_encoder
from tests.model.truth.states import ARCHITECTURES, SHARED, States, make, states_of
from tests.model.truth.subject import NUM_NEW, Models
from tests.model.truth.windows import LONG as LENGTH
from tests.model.truth.windows import TEXT, make_gemma3, make_gemma3n
from tests.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, WINDOW, make_tiny_model

# -- layers with a window have blocks of their own, which leave with the window


_dice = random.Random(9)
DECODES, CHUNKS = [1, 2, 3, 300, *range(350, 356)], sorted(_dice.sample(range(1, LENGTH), 7))
OTHERS = [_dice.choices(range(VOCAB_SIZE), k=length) for length in (300, 60)]
WAYS: list[tuple[Form, int, list[int], list[list[int]]]] = [
    (Form.HOLES, 4, DECODES, OTHERS),
    (Form.STALE, 4, CHUNKS, []),
    (Form.HOLES, 32, CHUNKS, OTHERS),
    (Form.STALE, 16, DECODES, []),
]
"""To compute a text again: the form of its tables; their blocks, with fewer keys than a vector, and with more; where its chunks and
decodes end; the texts next to it."""


@pytest.mark.parametrize(
    ("runtime", "dtype"),
    [
        pytest.param("native", "float32", marks=pytest.mark.native),
        pytest.param("native", "bfloat16", marks=pytest.mark.native),
        pytest.param("torch", "float32", marks=NEEDS_PACKING),
    ],
)
@pytest.mark.parametrize("window", [100, 270])
def test_a_text_has_the_same_bits_with_and_without_the_blocks_before_its_window(
    runtime: RuntimeName, dtype: DTypeName, window: int, tmp_path: Path
) -> None:
    """Windows begin inside a partition of 256 keys, at its first key, and before it."""
    loaded = load(make_gemma3(tmp_path, window), dtype=dtype, runtime=runtime)
    whole = RingCache(loaded, by_window=False)
    expected = whole.logits(TEXT, [])
    whole.runner.close()
    assert expected.isfinite().all()
    num_turned = 0
    for form, block_size, cuts, others in WAYS:
        cache = RingCache(loaded, form, num_blocks=1200 // block_size + 400, block_size=block_size)
        if runtime == "native":
            cache.forbid_the_null_block()
        found = cache.logits(TEXT, cuts, others)
        cache.runner.close()
        num_turned += cache.num_turned
        assert torch.equal(found, expected), (form, block_size)
    assert num_turned > 4, "no ring turned"


@pytest.mark.native
def test_native_threads_share_a_long_window(tmp_path: Path) -> None:
    """Few decodes are split into partitions among threads, and those before the window are left out."""
    loaded = load(make_gemma3(tmp_path, 100), runtime="native")
    assert isinstance(loaded.runtime, NativeRuntime)
    several = replace(loaded, runtime=replace(loaded.runtime, num_threads=3))
    expected = RingCache(loaded, by_window=False).logits(TEXT, [])
    for form in Form:
        cache = RingCache(several, form)
        cache.forbid_the_null_block()
        assert torch.equal(cache.logits(TEXT, [300, 396, 397, 398], [TEXT[:290]]), expected)
        cache.runner.close()


def test_layers_that_read_the_kv_of_others_are_found_by_what_they_are_called_with(tmp_path: Path) -> None:
    """Also without weights, so that the memory is planned for what is stored."""
    loaded = load(make_gemma3n(tmp_path, WINDOW))
    sources = [None, None, None, 1, 2]
    assert [layer.source for layer in loaded.runtime.layers] == sources
    meta = build_meta_model(AutoConfig.from_pretrained(tmp_path))
    assert [layer.source for layer in meta.layers] == sources
    assert kv_bytes_per_token(loaded.runtime.layers, torch.float32) == 3 * 2 * (16 + 16) * 4


# -- recurrent layers over blocks of states


FORGETFUL = {"jamba"}
"""Their scans begin with zeros when they get several tokens."""


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name != "falcon_h1"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> States:
    return make(request.param, False, Models(tmp_path_factory.mktemp))


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
    prompt = list(subject.tiny.prompts[LONG])
    rows = PromptRows(0, prompt[1:], num_top=1)
    found = []
    for max_prompt_rows in (64, 7):
        paged = PagedModel(subject.loaded)
        runner = paged.runner
        runner._max_prompt_rows = max_prompt_rows
        part = paged.next_part(replace(paged.request(prompt, 0), computed=0))
        (result,) = runner.execute(Step([part._replace(prompt_rows=rows, state=StateBlocks(0, 1, 2))]))
        assert result.token is not None
        assert all(map(torch.equal, states_of(paged, 1), states_of(paged, 2)))
        found.append([result.token.token_id, *(logprobs.logprob for logprobs in result.prompt_logprobs)])
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_state_that_is_not_finite_is_reported(subject: States) -> None:
    paged = PagedModel(subject.loaded)
    both = good, bad = [paged.request(prompt, 1) for prompt in subject.tiny.prompts[:2]]
    paged.run(both)
    assert paged.runner.kv_cache.states is not None
    for tensor in paged.runner.kv_cache.states:
        tensor[bad.running] = float("nan")
    bad.snapshots[len(bad.prompt) + 1] = paged.state_block()
    first, second = paged.runner.execute(Step([paged.next_part(request) for request in both]))
    assert first.bad_logits is None
    assert first.token is not None
    assert [good.token_ids[0], first.token.token_id] == subject.truths[0].tokens[:2]
    assert second.bad_logits is not None


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(make_tiny_model("lfm2", tmp_path_factory.mktemp("lfm2")).path)


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
    states: tuple[StateBlocks | None, ...], start: int, message: str, lfm2: LoadedModel
) -> None:
    paged = PagedModel(lfm2)
    tables = [[1, 2], [3, 4]]
    parts = [
        SequencePart([5, 6], start if index == 0 else 0, (tables[index],), GREEDY, state=state)
        for index, state in enumerate(states)
    ]
    with pytest.raises(PackingError, match=message):
        paged.runner.execute(Step(parts))
    assert all(bool(tensor[1:].isnan().all()) for tensor in paged.runner.kv_cache.states or ())


def test_a_model_without_attention_needs_no_backend_that_runs_here(tmp_path: Path) -> None:
    loaded = load(make_tiny_model("mamba2", tmp_path).path, max_model_len=MAX_MODEL_LEN)
    assert loaded.runtime.layers == []
    assert isinstance(loaded.attention_backend("flash", BLOCK_SIZE, quiet), TorchAttention)


# -- encoder-decoder models: bits, and groups with windows


@NEEDS_PACKING
def test_bits_are_the_same_alone_and_packed(tmp_path: Path) -> None:
    subject = make_with_encoder("umt5", tmp_path)
    backend = subject.loaded.attention_backend("torch", BLOCK_SIZE, lambda _: None)
    promise = subject.loaded.try_batch_invariance(backend).facts.batch_invariance
    assert promise.promised, promise.reason
    found = []
    for together in (False, True):
        paged = PagedModel(subject.loaded)
        pairs = zip(subject.prompts, subject.inputs, strict=True)
        requests = [paged.request(prompt, NUM_NEW, encoder=paged.encoder(given)) for prompt, given in pairs]
        for some in [requests] if together else [[request] for request in requests]:
            paged.run(some, chunk=5, stagger=1)
        found.append([request.logprobs for request in requests])
    assert found[0] == found[1]


def test_windows_have_blocks_of_their_own_and_the_cross_group_comes_last(tmp_path: Path) -> None:
    """T5Gemma over its real groups: full attention, a window, the encoder's output."""
    subject = make_with_encoder("t5gemma", tmp_path)
    cache = RingCache(subject.loaded, num_blocks=40, backend=TorchAttention(torch.float32, NEVER))
    assert [group.window for group in cache.plan.groups] == [None, 8]
    assert {layer.group for layer in cache.runner.kv_cache.layers if layer.is_cross} == {2}
    given, prompt = subject.inputs[2], subject.prompts[1]
    text = cache.text(prompt, NUM_NEW)
    text.encoder = EncoderBlocks(list(range(30, 30 - 11, -1)), len(given), given)
    cache.run([text], chunk=5)
    subject.answer(given, prompt).check(text.sampled, subject.tolerance)
