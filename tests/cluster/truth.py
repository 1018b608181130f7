"""What a cluster's answers are held against: transformers' own generate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import pytest
import torch

from kvpool.client import Completion
from tests.tiny_models import MIN_MARGIN, Oracle, TinyModel

LOGPROB_TOLERANCE = 1e-4
NUM_TOP = 3
"""Log-probabilities asked for beside the sampled token's."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The greedy continuation of one prompt, which is beyond doubt."""

    prompt: tuple[int, ...]
    tokens: list[int]
    best: list[list[float]]
    """The NUM_TOP largest log-probabilities at each step, the token's first."""

    @classmethod
    def of(cls, oracle: Oracle, prompt: Sequence[int], num_tokens: int) -> Self:
        """Computed in the test's process. AssertionError if rounding may turn a token into another."""
        tokens, logits = oracle.logits(tuple(prompt), num_tokens)
        best = torch.log_softmax(logits, dim=-1).topk(NUM_TOP, dim=-1).values
        margin = float((best[:, 0] - best[:, 1]).min())
        assert margin >= MIN_MARGIN, f"the prompt {prompt[:8]}… proves nothing: two best logits {margin:.1g} apart"
        return cls(tuple(prompt), tokens, best.tolist())

    def first(self, num_tokens: int) -> Truth:
        """The first tokens of the same text."""
        return Truth(self.prompt, self.tokens[:num_tokens], self.best[:num_tokens])

    def check(self, completion: Completion, tolerance: float = LOGPROB_TOLERANCE) -> None:
        """The answer is this text, with these log-probabilities."""
        assert list(completion.token_ids) == self.tokens
        assert completion.num_prompt_tokens == len(self.prompt)
        assert completion.logprobs is not None
        for best, given in zip(self.best, completion.logprobs, strict=True):
            assert given.logprob == pytest.approx(best[0], abs=tolerance)
            assert [value for _, value in given.top] == pytest.approx(best[: len(given.top)], abs=tolerance)


def truths_of(tiny: TinyModel) -> list[Truth]:
    oracle = Oracle.of(tiny.path)
    return [Truth.of(oracle, prompt, tiny.num_new_tokens) for prompt in tiny.prompts]


def check_all(truths: Iterable[Truth], completions: Iterable[Completion]) -> None:
    for truth, completion in zip(truths, completions, strict=True):
        truth.check(completion)
