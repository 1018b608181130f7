"""Encoder-decoder models, whose texts read the encoder's output in blocks of its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvpool.worker_service.model.guard.tiny_replica import NUM_PLAIN_TOKENS, replica_config
from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SampledToken
from scripts.models.subjects import default_seq2seq_config
from scripts.models.trial import save
from tests.model.paged import BLOCK_SIZE, SHORT_SEGMENTS, PagedModel, load
from tests.model.truth.subject import NUM_NEW, Hit, Models, SharingSubject, Truth, Way
from tests.tiny_models import Oracle

LONGEST = 128
INPUT_LENGTHS = (5, 19, 41, 26)
PROMPT_LENGTHS = (1, 12, 1, 6)
"""Tokens of the decoder's prompts, with its start token."""
# Relative positions once for all layers, and in each layer; learned positions, and computed ones that look at the padding; a
# decoder that takes position ids, with windows; two BERTs.
KINDS = ("t5", "umt5", "bart", "m2m_100", "t5gemma", "encoder-decoder")


def tokens(length: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(16, NUM_PLAIN_TOKENS) for _ in range(length)]


@dataclass
class Encoders(SharingSubject):
    """A tiny model of this kind."""

    tolerance: ClassVar[float] = 2e-4
    loaded: LoadedModel
    path: Path
    _answers: dict[tuple[tuple[int, ...], ...], Truth] = field(default_factory=dict)

    @property
    def start(self) -> int:
        assert self.loaded.encoder is not None
        return self.loaded.encoder.decoder_prompt[0]

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
    def truths(self) -> list[Truth]:  # type: ignore[override]
        return [self.answer(given, prompt) for given, prompt in zip(self.inputs, self.prompts, strict=True)]

    def answer(self, given: Sequence[int], prompt: Sequence[int]) -> Truth:
        """Computed once."""
        key = (tuple(given), tuple(prompt))
        if key not in self._answers:
            self._answers[key] = Truth(*self.oracle.logits(given, NUM_NEW, prompt))
        return self._answers[key]

    def prove(self) -> None:
        """The truth depends on the input, and on the order of the decoder's prompt."""
        truth, given, prompt = self.truths[1], self.inputs[1], self.prompts[1]
        for other in (
            self.answer(given[::-1], prompt),
            self.answer(given, [prompt[0], *prompt[-2:0:-1], prompt[-1]]),
        ):
            assert float((other.logits[0] - truth.logits[0]).abs().max()) > 100 * self.tolerance

    def compute(self, way: Way) -> list[list[SampledToken]]:
        paged = PagedModel(self.loaded)
        pairs = zip(self.prompts, self.inputs, strict=True)
        runs = way.runs([paged.request(prompt, NUM_NEW, encoder=paged.encoder(given)) for prompt, given in pairs])
        for together in runs:
            paged.run(together)
        return [request.sampled for together in runs for request in together]

    def hit(self, spoils: bool = False) -> Hit:
        """Texts over one input that share the beginning, also with a bias by distance, which differs between them."""
        paged = PagedModel(self.loaded, min_shared_tokens=1, shapes=SHORT_SEGMENTS)
        prompt = [self.start, *tokens(23, 5)]
        prompts = [prompt, [*prompt, *tokens(4, 6)], [*prompt, *tokens(1, 7)]]
        encoder = paged.encoder(self.inputs[3])
        first = paged.request(prompt, 1, encoder=encoder)
        paged.run([first])
        sealed, computed = first.table[: len(prompt) // BLOCK_SIZE - 1], encoder._replace(token_ids=())
        before = paged.block_bytes(sealed, encoder)
        if spoils:
            for layer in paged.runner.kv_cache.layers:
                if layer.is_cross:
                    layer.v_cache[encoder.table] += 3.0
        requests = [paged.request(each, NUM_NEW, sealed, encoder=computed) for each in prompts]
        paged.run(requests, chunk=3)
        truths = [self.answer(self.inputs[3], each) for each in prompts]
        return Hit([each.sampled for each in requests], truths, before, paged.block_bytes(sealed, encoder))


def make(kind: str, folder: Path) -> Encoders:
    save(replica_config(default_seq2seq_config(kind), 1 << 20), folder)
    return Encoders(load(folder, max_model_len=LONGEST), folder)


def subjects() -> Iterator[Any]:
    """One of each kind of positions and masks."""

    def make_one(kind: str, models: Models) -> Encoders:
        return make(kind, models.new_folder(kind))

    for kind in KINDS:
        yield pytest.param((make_one, kind), id=kind)
