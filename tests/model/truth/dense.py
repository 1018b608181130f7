"""Models whose KV is kept for the whole text, at every place that can compute them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvpool.worker_service.model.errors import ModelError
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SampledToken
from tests.model.paged import BLOCK_SIZE, NATIVE, PLACES, SHORT_SEGMENTS, PagedModel, Place, Request
from tests.model.truth.subject import NUM_NEW, Hit, Models, SharingSubject, Truth, Way
from tests.refused import refused
from tests.tiny_models import ARCHITECTURES, TinyModel, make_tiny_model

NATIVE_ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "gpt2", "phi3", "gemma2", "granite", "mistral", "olmo2", "opt", "gpt_neox"}
)
"""Architectures that the native step computes."""
TORCH_ARCHITECTURES = frozenset({"llama", "qwen2", "gpt2", "gemma2", "opt", "granite", "gpt_oss", "deepseek_v3"})
"""One of each kind that attention, positions and the head know: heads that share K and V, windows in some layers, learned
positions, soft caps, positions that do not begin with 0, scales, sinks with experts, heads of V of another size. On a GPU all are
computed."""
LONG = 2
"""The prompt of 41 tokens; the next one shares its first 20."""


def tiny_model(architecture: str, models: Models) -> tuple[TinyModel, list[Truth]]:
    """With as many new tokens as the truths have."""
    made = models.made(architecture, lambda folder: make_tiny_model(architecture, folder).prompts)
    return TinyModel(architecture, made.path, tuple(map(tuple, made.prompts)), NUM_NEW), made.truths


@dataclass
class Paged(SharingSubject):
    """A tiny model over a pool of one group."""

    tiny: TinyModel
    loaded: LoadedModel
    truths: list[Truth]

    def paged(self, **sharing: Any) -> PagedModel:
        """With a cache of its own. sharing: how plain torch treats shared prefixes."""
        return PagedModel(self.loaded, **sharing)

    def requests(self, paged: PagedModel) -> list[Request]:
        """One for each prompt."""
        return [paged.request(prompt, self.tiny.num_new_tokens) for prompt in self.tiny.prompts]

    def compute(self, way: Way) -> list[list[SampledToken]]:
        paged = self.paged()
        runs = way.runs(self.requests(paged))
        for together in runs:
            paged.run(together)
        return [request.sampled for together in runs for request in together]


@dataclass
class Dense(Paged):
    """One whose texts share full blocks."""

    place: Place

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """On a GPU sums go in other orders than on the CPU, where the oracle runs."""
        return 1e-4 if self.place.device == "cpu" else 1e-3

    def paged(self, **sharing: Any) -> PagedModel:
        if self.place.backend == "torch":
            return PagedModel(self.loaded, **sharing)
        if self.place.backend == "native":
            return PagedModel(self.loaded)
        backend = self.loaded.attention_backend(self.place.backend, BLOCK_SIZE, lambda _: None)  # type: ignore[arg-type]
        return PagedModel(self.loaded, backend=backend)

    def hit(self, spoils: bool = False) -> Hit:
        """The same prompt again, of which all but the last token is cached; the prompt that shares 20 tokens; a stranger."""
        paged = self.paged(min_shared_tokens=1, shapes=SHORT_SEGMENTS)
        prompts, num_new = self.tiny.prompts, self.tiny.num_new_tokens
        first = paged.request(prompts[LONG], 1)
        paged.run([first])
        sealed = first.table[: len(prompts[LONG]) // BLOCK_SIZE]
        before = paged.block_bytes(sealed)
        if spoils:  # the last block, which is inside every window of the first token computed
            for layer in paged.runner.kv_cache.layers:
                layer.v_cache[sealed[-1]] += 3.0
        sharers = [
            paged.request(prompts[LONG], num_new, shared=sealed),
            paged.request(prompts[LONG], num_new, shared=sealed[:3]),
            paged.request(prompts[LONG + 1], num_new, shared=sealed[:5]),
            paged.request(prompts[0], num_new),
        ]
        paged.run(sharers, chunk=7, stagger=1)
        truths = [self.truths[index] for index in (LONG, LONG, LONG + 1, 0)]
        return Hit([each.sampled for each in sharers], truths, before, paged.block_bytes(sealed))


def subjects() -> Iterator[Any]:
    """Architectures at every place; natively all that run so."""

    def make(place: Place, architecture: str, models: Models) -> Dense:
        tiny, truths = tiny_model(architecture, models)
        loaded = models.loaded(architecture, device=place.device, runtime=place.runtime)
        subject = Dense(tiny, loaded, truths, place)
        try:
            subject.paged().runner.close()
        except ModelError as refusal:
            assert place.backend != "torch"
            refused(refusal)
        return subject

    for place in PLACES:
        for architecture in ARCHITECTURES:
            if place.device != "cpu" or architecture in (
                NATIVE_ARCHITECTURES if place == NATIVE else TORCH_ARCHITECTURES
            ):
                yield pytest.param((make, place, architecture), marks=place.marks, id=f"{place}-{architecture}")
