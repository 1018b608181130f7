"""Encoder-decoder models over the paged pool equal transformers' generate, token by token, in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch

from kvpool.worker_service.attention.torch_backend import TorchAttention
from kvpool.worker_service.engine.step import EncoderBlocks, SequencePart, Step
from kvpool.worker_service.model.forward.kv_groups import groups_of
from kvpool.worker_service.model.forward.kv_plan import CrossPlan, GroupPlan, KVCachePlan
from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config
from kvpool.worker_service.model.load import LoadedModel
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.model.paged import BLOCK_SIZE, GREEDY, NEEDS_PACKING, NEVER, SHORT_SEGMENTS, load
from tests.model.paged_seq2seq import Oracle, PagedSeq2Seq, Request

# transformers' own modules, imported by these models, annotate in a way that torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

LOGPROB_TOLERANCE = 2e-4
NUM_NEW = 10
LONGEST = 128
INPUT_LENGTHS = (5, 19, 41, 26)
PROMPT_LENGTHS = (1, 12, 1, 6)
"""Tokens of the decoder's prompts, with its start token."""
# Relative positions once for all layers, and in each layer; learned positions, computed ones, some that look at the padding; a
# decoder that takes position ids, with windows; two BERTs.
KINDS = ("t5", "umt5", "bart", "pegasus", "m2m_100", "t5gemma", "encoder-decoder")


@dataclass
class Subject:
    loaded: LoadedModel
    path: Path

    @property
    def start(self) -> int:
        assert self.loaded.facts.encoder is not None
        return self.loaded.facts.encoder.decoder_start_token_id

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle.of(self.path)

    @cached_property
    def inputs(self) -> list[list[int]]:
        return [tokens(length, seed) for seed, length in enumerate(INPUT_LENGTHS)]

    @cached_property
    def prompts(self) -> list[list[int]]:
        return [[self.start, *tokens(length - 1, 10 + seed)] for seed, length in enumerate(PROMPT_LENGTHS)]

    @cached_property
    def truth(self) -> list[tuple[list[int], torch.Tensor]]:
        return [self.answer(given, prompt) for given, prompt in zip(self.inputs, self.prompts, strict=True)]

    def answer(self, given: Sequence[int], prompt: Sequence[int]) -> tuple[list[int], torch.Tensor]:
        return self.oracle.logits(given, NUM_NEW, prompt)


def tokens(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(16, NUM_PLAIN_TOKENS) for _ in range(length)]


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def make_subject(kind: str, folder: Path) -> Subject:
    save(replica_config(default_seq2seq_config(kind), 1 << 20), folder)
    return Subject(load(folder, max_model_len=LONGEST), folder)


def assert_true(request: Request, truth: tuple[list[int], torch.Tensor]) -> None:
    found, logits = truth
    assert request.token_ids == found
    logprobs = torch.log_softmax(logits, dim=-1)
    for index, sampled in enumerate(request.sampled):
        assert sampled.logprobs is not None
        best = logprobs[index].topk(3)
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(
            best.values.tolist(), abs=LOGPROB_TOLERANCE
        )


def test_the_oracle_depends_on_the_input_and_on_positions(subject: Subject) -> None:
    """Else equality would prove nothing."""
    (_, logits), given, prompt = subject.truth[1], subject.inputs[1], subject.prompts[1]
    _, other_input = subject.answer(given[::-1], prompt)
    _, other_order = subject.answer(given, [prompt[0], *prompt[-2:0:-1], prompt[-1]])
    for other in (other_input, other_order):
        assert float((other[0] - logits[0]).abs().max()) > 100 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("chunk", [NEVER, 3])
def test_each_text_alone_equals_generate(subject: Subject, chunk: int) -> None:
    paged = PagedSeq2Seq(subject.loaded)
    for given, prompt, truth in zip(subject.inputs, subject.prompts, subject.truth, strict=True):
        request = paged.request(prompt, paged.encoder(given), NUM_NEW)
        paged.run([request], chunk)
        assert_true(request, truth)


@pytest.mark.parametrize(("chunk", "stagger"), [(NEVER, 0), (3, 0), (3, 2), (1, 3)])
def test_texts_over_other_inputs_in_one_row_equal_generate(subject: Subject, chunk: int, stagger: int) -> None:
    paged = PagedSeq2Seq(subject.loaded)
    encoders = [paged.encoder(given) for given in subject.inputs]
    requests = [
        paged.request(prompt, encoder, NUM_NEW) for prompt, encoder in zip(subject.prompts, encoders, strict=True)
    ]
    paged.run(requests, chunk, stagger)
    for request, truth in zip(requests, subject.truth, strict=True):
        assert_true(request, truth)


def test_an_input_that_the_blocks_hold_is_not_encoded_again(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedSeq2Seq(subject.loaded)
    encoder = paged.encoder(subject.inputs[1])
    first = paged.request(subject.prompts[1], encoder, NUM_NEW)
    paged.run([first])
    monkeypatch.setattr(paged.runner.forward, "encode", lambda *_: pytest.fail("the encoder ran again"))
    known = encoder._replace(token_ids=())
    again, other = paged.request(subject.prompts[1], known, NUM_NEW), paged.request(subject.prompts[3], known, NUM_NEW)
    paged.run([again, other], chunk=3, stagger=1)
    assert_true(again, subject.truth[1])
    assert_true(other, subject.answer(subject.inputs[1], subject.prompts[3]))


@pytest.mark.parametrize("brings_first", [True, False])
def test_one_part_of_a_step_brings_the_input_for_all(subject: Subject, brings_first: bool) -> None:
    """The encoder runs before all parts, whatever their order."""
    paged = PagedSeq2Seq(subject.loaded)
    encoder = paged.encoder(subject.inputs[1])
    requests = [
        paged.request(subject.prompts[1], encoder, NUM_NEW),
        paged.request(subject.prompts[1], encoder._replace(token_ids=()), NUM_NEW),
    ]
    paged.run(requests if brings_first else requests[::-1])
    for request in requests:
        assert_true(request, subject.truth[1])


def test_a_decoder_hit_needs_no_unit(subject: Subject) -> None:
    """The KV of the decoder's prompt is found, that of the encoder's output is gone: the encoder runs again, into other blocks."""
    paged = PagedSeq2Seq(subject.loaded)
    first = paged.request(subject.prompts[1], paged.encoder(subject.inputs[1]), NUM_NEW)
    paged.run([first])
    sealed = first.table[: len(subject.prompts[1]) // BLOCK_SIZE]
    for layer in paged.runner.kv_cache.layers:
        if layer.is_cross:
            layer.k_cache[first.encoder.table] = layer.v_cache[first.encoder.table] = float("nan")
    second = paged.request(subject.prompts[1], paged.encoder(subject.inputs[1]), NUM_NEW, shared=sealed[:-1])
    paged.run([second])
    assert_true(second, subject.truth[1])


def test_the_blocks_are_what_is_read(subject: Subject) -> None:
    """Another KV in one cross block gives another result: the input is not encoded behind our back."""
    paged = PagedSeq2Seq(subject.loaded)
    encoder = paged.encoder(subject.inputs[1])
    first = paged.request(subject.prompts[1], encoder, NUM_NEW)
    paged.run([first])
    for layer in paged.runner.kv_cache.layers:
        if layer.is_cross:
            layer.v_cache[encoder.table[-1]] += 3.0
    second = paged.request(subject.prompts[1], encoder._replace(token_ids=()), NUM_NEW)
    paged.run([second])
    before, after = (each.sampled[0].logprobs for each in (first, second))
    assert before is not None
    assert after is not None
    assert abs(before.logprob - after.logprob) > 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("min_shared_tokens", [NEVER, 1], ids=["gathered", "attended_once"])
def test_texts_that_share_the_beginning_equal_generate(subject: Subject, min_shared_tokens: int) -> None:
    """Also with a bias by distance, which is another one for each of them."""
    paged = PagedSeq2Seq(subject.loaded, min_shared_tokens=min_shared_tokens, shapes=SHORT_SEGMENTS)
    prompt = [subject.start, *tokens(23, 5)]
    prompts = [prompt, [*prompt, *tokens(4, 6)], [*prompt, *tokens(1, 7)]]
    encoder = paged.encoder(subject.inputs[3])
    first = paged.request(prompt, encoder, NUM_NEW)
    paged.run([first])
    sealed, known = first.table[: len(prompt) // BLOCK_SIZE - 1], encoder._replace(token_ids=())
    requests = [paged.request(each, known, NUM_NEW, shared=sealed) for each in prompts]
    paged.run(requests, chunk=3)
    for request, each in zip(requests, prompts, strict=True):
        assert_true(request, subject.answer(subject.inputs[3], each))


def test_the_longest_text_equals_generate(subject: Subject) -> None:
    paged = PagedSeq2Seq(subject.loaded)
    prompt = [subject.start, *tokens(LONGEST - NUM_NEW - 1, 8)]
    requests = [paged.request(prompt, paged.encoder(subject.inputs[index]), NUM_NEW) for index in (0, 2)]
    paged.run(requests, chunk=100)  # more tokens in a row than a text has
    for request, index in zip(requests, (0, 2), strict=True):
        assert_true(request, subject.answer(subject.inputs[index], prompt))


@NEEDS_PACKING
def test_bits_are_the_same_alone_and_packed(subject: Subject) -> None:
    """If the worker promises it, which it tries at load."""
    backend = subject.loaded.attention_backend("torch", BLOCK_SIZE, lambda _: None)
    promise = subject.loaded.try_batch_invariance(backend).facts.batch_invariance
    assert promise.is_promised, promise.reason
    found: list[list[list[float]]] = []
    for together in (False, True):
        paged = PagedSeq2Seq(subject.loaded)
        pairs = zip(subject.prompts, subject.inputs, strict=True)
        requests = [paged.request(prompt, paged.encoder(given), NUM_NEW) for prompt, given in pairs]
        for some in [requests] if together else [[request] for request in requests]:
            paged.run(some, chunk=5, stagger=1)
        found.append([[token.logprobs.logprob for token in each.sampled if token.logprobs] for each in requests])
    assert found[0] == found[1]


def test_windows_have_blocks_of_their_own_and_the_cross_group_comes_last(tmp_path: Path) -> None:
    """T5Gemma over its real groups: full attention, a window, the encoder's output."""
    subject = make_subject("t5gemma", tmp_path)
    windows = [group.window for group in groups_of(subject.loaded.layers)]
    assert windows == [None, 8]
    groups = tuple(GroupPlan(index, window, 40, 0) for index, window in enumerate(windows))
    plan = KVCachePlan(BLOCK_SIZE, groups, cross=CrossPlan(40, 0, 64))
    runner = subject.loaded.runner(plan, TorchAttention(torch.float32, NEVER))
    assert {layer.group for layer in runner.kv_cache.layers if layer.is_cross} == {2}
    runner.kv_cache.fill(float("nan"))
    given, prompt = subject.inputs[2], subject.prompts[1]
    encoder = EncoderBlocks(list(range(30, 30 - 11, -1)), len(given), given)
    full, window = list(range(1, 13)), list(range(21, 33))
    request = Request(prompt, full, encoder, NUM_NEW)
    while len(request.sampled) < NUM_NEW:
        known, done = [*prompt, *request.token_ids], request.computed
        # What has left the window is gone.
        gone = max(0, done + 1 - 8) // BLOCK_SIZE
        tables = (full, [0] * gone + window[gone:])
        part = SequencePart(known[done : done + 5], done, tables, None, encoder=encoder)
        request.computed += len(part.token_ids)
        (result,) = runner.execute(Step([part._replace(sampling=GREEDY if request.computed == len(known) else None)]))
        encoder = encoder._replace(token_ids=())
        if result.token is not None:
            request.sampled.append(result.token)
    assert_true(request, subject.answer(given, prompt))
