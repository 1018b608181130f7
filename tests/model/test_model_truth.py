"""Paged computation in float32 equals transformers' generate, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.load import LoadedModel
from tests.model.paged import BLOCK_SIZE, NATIVE, NEVER, PLACES, SHORT_SEGMENTS, PagedModel, Place, Request, load
from tests.refused import refused
from tests.tiny_models import ARCHITECTURES, MIN_MARGIN, WINDOW, Oracle, TinyModel, make_tiny_model

LOGPROB_TOLERANCE = 1e-4
GPU_LOGPROB_TOLERANCE = 1e-3
"""Sums go in other orders there than on the CPU, where the oracle runs."""


NATIVE_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "gpt2", "phi3", "gemma2", "granite", "mistral", "olmo2", "opt", "gpt_neox"}
)
"""Architectures that the native step computes."""


@dataclass
class Subject:
    tiny: TinyModel
    loaded: LoadedModel
    place: Place

    def paged(self, **sharing: Any) -> PagedModel:
        """With a KV cache of its own. sharing: how plain torch treats shared prefixes."""
        if self.place.backend == "torch":
            return PagedModel(self.loaded, **sharing)
        if self.place.backend == "native":
            return PagedModel(self.loaded)
        backend = self.loaded.attention_backend(self.place.backend, BLOCK_SIZE, lambda _: None)  # type: ignore[arg-type]
        return PagedModel(self.loaded, backend=backend)

    @cached_property
    def truth(self) -> list[tuple[list[int], torch.Tensor]]:
        """Per prompt: tokens and logits."""
        oracle = Oracle.of(self.tiny.path)
        return [oracle.logits(prompt, self.tiny.num_new_tokens) for prompt in self.tiny.prompts]


def _subjects() -> Iterator[Any]:
    """Every architecture at every place, natively those that run so."""
    for place in PLACES:
        for architecture in ARCHITECTURES:
            if place != NATIVE or architecture in NATIVE_ARCHITECTURES:
                yield pytest.param((place, architecture), marks=place.marks, id=f"{place}-{architecture}")


@pytest.fixture(scope="module", params=_subjects())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    place, architecture = request.param
    tiny = make_tiny_model(architecture, tmp_path_factory.mktemp(architecture))
    subject = Subject(tiny, load(tiny.path, place.device, runtime=place.runtime), place)
    try:
        subject.paged().runner.close()
    except ModelError as refusal:
        assert place.backend != "torch"
        refused(refusal)
    return subject


def assert_true(request: Request, truth: tuple[list[int], torch.Tensor], place: Place) -> None:
    tokens, logits = truth
    tolerance = LOGPROB_TOLERANCE if place.device == "cpu" else GPU_LOGPROB_TOLERANCE
    assert request.token_ids == tokens
    logprobs = torch.log_softmax(logits, dim=-1)
    for index, sampled in enumerate(request.sampled):
        assert sampled.logprobs is not None
        assert sampled.logprobs.logprob == pytest.approx(float(logprobs[index, sampled.token_id]), abs=tolerance)
        best = logprobs[index].topk(3)
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(best.values.tolist(), abs=tolerance)


def test_oracle_is_beyond_doubt_and_varies(subject: Subject) -> None:
    """Where the oracle's two best logits are close, or all texts alike, equality would prove nothing."""
    for tokens, logits in subject.truth:
        best = logits.topk(2, dim=-1).values
        assert float((best[:, 0] - best[:, 1]).min()) >= MIN_MARGIN
        assert len(set(tokens)) >= 6
    assert len({tuple(tokens) for tokens, _ in subject.truth}) == len(subject.truth)
    assert max(len(prompt) for prompt in subject.tiny.prompts) > 2 * WINDOW


@pytest.mark.parametrize("chunk", [NEVER, 7])
def test_each_prompt_alone_equals_generate(subject: Subject, chunk: int) -> None:
    """In chunks there are steps in which nobody wants logits."""
    paged = subject.paged()
    for prompt, truth in zip(subject.tiny.prompts, subject.truth, strict=True):
        request = paged.request(prompt, subject.tiny.num_new_tokens)
        paged.run([request], chunk)
        assert_true(request, truth, subject.place)


@pytest.mark.parametrize(("chunk", "stagger"), [(NEVER, 0), (7, 0), (7, 2), (1, 3)])
def test_batched_chunked_and_mixed_equals_generate(subject: Subject, chunk: int, stagger: int) -> None:
    """Neighbours, chunk borders, and prefill beside decode change nothing."""
    paged = subject.paged()
    requests = [paged.request(prompt, subject.tiny.num_new_tokens) for prompt in subject.tiny.prompts]
    paged.run(requests, chunk, stagger)
    for request, truth in zip(requests, subject.truth, strict=True):
        assert_true(request, truth, subject.place)


@pytest.mark.parametrize("min_shared_tokens", [NEVER, 1], ids=["gathered", "attended_once"])
def test_shared_prefix_equals_generate_and_is_never_written(subject: Subject, min_shared_tokens: int) -> None:
    """Sharers of sealed blocks get the truth, whether they read them one by one or once for all."""
    paged = subject.paged(min_shared_tokens=min_shared_tokens, shapes=SHORT_SEGMENTS)
    prompts, truths, num_new = subject.tiny.prompts, subject.truth, subject.tiny.num_new_tokens
    first = paged.request(prompts[2], num_new)
    paged.run([first])
    sealed = first.table[: len(prompts[2]) // BLOCK_SIZE]
    before = paged.block_bytes(sealed)

    # The same prompt again (all but its last token cached), the prompt that shares 20 tokens, and a stranger.
    sharers = [
        paged.request(prompts[2], num_new, shared=sealed),
        paged.request(prompts[2], num_new, shared=sealed[:3]),
        paged.request(prompts[3], num_new, shared=sealed[:5]),
        paged.request(prompts[0], num_new),
    ]
    paged.run(sharers, chunk=7, stagger=1)
    for request, truth in zip(sharers, (truths[2], truths[2], truths[3], truths[0]), strict=True):
        assert_true(request, truth, subject.place)
    for then, now in zip(before, paged.block_bytes(sealed), strict=True):
        assert torch.equal(then, now)


def test_the_cache_is_what_is_read(subject: Subject) -> None:
    """Another KV in one cached block gives another result: the prefix is not recomputed behind our back."""
    paged = subject.paged()
    prompt, num_new = subject.tiny.prompts[2], subject.tiny.num_new_tokens
    first = paged.request(prompt, num_new)
    paged.run([first])
    sealed = first.table[: len(prompt) // BLOCK_SIZE]
    for layer in paged.runner.kv_cache.layers:
        # The last sealed block: inside every window of the first token computed.
        layer.v_cache[sealed[-1]] += 3.0
    sharer = paged.request(prompt, num_new, shared=sealed)
    paged.run([sharer])
    assert abs(sharer.logprobs[0] - first.logprobs[0]) > 100 * LOGPROB_TOLERANCE
