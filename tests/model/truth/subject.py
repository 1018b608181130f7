"""What the table of truth asks of a kind of KV: a model of that kind over a cache, with prompts and what must follow them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
import torch

from kvpool.worker_service.model.load import LoadedModel
from kvpool.worker_service.step import SampledToken
from tests.model.paged import Request, load
from tests.tiny_models import MIN_MARGIN, Oracle

LOGPROB_TOLERANCE = 1e-4
NUM_NEW = 6
"""Tokens behind each prompt: blocks are begun and filled."""


RequestT = TypeVar("RequestT", bound=Request)


class Truth(NamedTuple):
    """What transformers' generate gives."""

    tokens: list[int]
    logits: torch.Tensor
    """[num_tokens, vocab_size], by which each token was chosen."""

    @property
    def margin(self) -> float:
        """The smallest distance between the two best logits."""
        best = self.logits.topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())

    def check(self, text: Sequence[SampledToken], tolerance: float = LOGPROB_TOLERANCE) -> None:
        """The tokens are equal, and so are the log-probabilities of each and of the best three."""
        assert [token.token_id for token in text] == self.tokens
        logprobs = torch.log_softmax(self.logits, dim=-1)
        for row, sampled in zip(logprobs, text, strict=True):
            assert sampled.logprobs is not None
            assert sampled.logprobs.logprob == pytest.approx(float(row[sampled.token_id]), abs=tolerance)
            assert [value for _, value in sampled.logprobs.top] == pytest.approx(
                row.topk(3).values.tolist(), abs=tolerance
            )


class Made(NamedTuple):
    """A model on disk."""

    path: Path
    prompts: list[Sequence[int]]
    truths: list[Truth]
    """By prompt."""


class Models:
    """Models by name. Each is made, and loaded for each way to compute it, once for all subjects."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self.new_folder = new_folder
        self._made: dict[str, Made] = {}
        self._loaded: dict[str, LoadedModel] = {}

    def made(self, name: str, save: Callable[[Path], Iterable[Sequence[int]]]) -> Made:
        """`save` puts the model into a folder, and returns its prompts."""
        if name not in self._made:
            path = self.new_folder(name)
            prompts = list(save(path))
            oracle = Oracle.of(path)
            truths = [Truth(*oracle.logits(tuple(prompt), NUM_NEW)) for prompt in prompts]
            self._made[name] = Made(path, prompts, truths)
        return self._made[name]

    def loaded(self, name: str, **how: Any) -> LoadedModel:
        """One that was made. `how`: as for tests.model.paged.load."""
        key = f"{name} {how}"
        if key not in self._loaded:
            self._loaded[key] = load(self._made[name].path, **how)
        return self._loaded[key]


class Way(NamedTuple):
    """To compute the texts after some prompts."""

    chunks: Sequence[int]
    """Sizes of their chunks at most, which the texts take in turn."""
    texts: Sequence[int] | None = None
    """Indices of the prompts, each of which runs after the one before has ended. None: all of them, together."""

    def runs(self, all_texts: Sequence[RequestT]) -> list[list[RequestT]]:
        """The texts that run together, in turn; their chunks are set."""
        chosen = [all_texts[index] for index in self.texts] if self.texts is not None else list(all_texts)
        for text, chunk in zip(chosen, cycle(self.chunks), strict=False):
            text.chunk = chunk
        return [chosen] if self.texts is None else [[text] for text in chosen]


class Hit(NamedTuple):
    """Texts that began with what the cache had."""

    texts: list[list[SampledToken]]
    truths: list[Truth]
    before: list[torch.Tensor]
    """What they hit, before they ran."""
    after: list[torch.Tensor]


class Subject(ABC):
    """A model with prompts."""

    tolerance: ClassVar[float] = LOGPROB_TOLERANCE
    truths: list[Truth]
    """By prompt."""

    @abstractmethod
    def compute(self, way: Way) -> list[list[SampledToken]]:
        """The texts after the prompts of a way, over a new cache."""

    def prove(self) -> None:
        """Raises AssertionError if a wrong computation might give the truth too: where the two best logits are close, or all texts
        alike."""
        assert all(truth.margin >= MIN_MARGIN for truth in self.truths)
        assert len({tuple(truth.tokens) for truth in self.truths}) > 1

    def check(self, texts: Iterable[Sequence[SampledToken]], truths: Sequence[Truth] | None = None) -> None:
        """The texts are the truths; None: those of the prompts."""
        for text, truth in zip(texts, self.truths if truths is None else truths, strict=True):
            truth.check(text, self.tolerance)


class SharingSubject(Subject):
    """A model of whose KV texts share what lasts: full blocks, a snapshot, the encoder's output."""

    @abstractmethod
    def hit(self, spoils: bool = False) -> Hit:
        """Texts that begin with what an earlier one has left. Attention reads a prefix once for all that share it. `spoils`: what
        they hit is changed before."""
