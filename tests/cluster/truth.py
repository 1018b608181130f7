"""What a cluster's answers are held against: transformers' own generate, computed in the test's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch

from kvpool.client import Completion
from tests.tiny_models import MIN_MARGIN, Oracle

LOGPROB_TOLERANCE = 1e-4
NUM_TOP = 3
"""Log-probabilities asked for beside the sampled token's."""


class Truth:
    """The greedy continuation of one prompt, which must be beyond doubt."""

    def __init__(self, oracle: Oracle, prompt: Sequence[int], num_tokens: int) -> None:
        self.prompt = tuple(prompt)
        self.tokens, logits = oracle.logits(self.prompt, num_tokens)
        best = logits.topk(2, dim=-1).values
        margin = float((best[:, 0] - best[:, 1]).min())
        assert margin >= MIN_MARGIN, f"the prompt {prompt[:8]}… proves nothing: two best logits {margin:.1g} apart"
        self._logprobs = torch.log_softmax(logits, dim=-1)

    def check(self, completion: Completion, tolerance: float = LOGPROB_TOLERANCE) -> None:
        """The answer is this text, with these log-probabilities."""
        assert list(completion.token_ids) == self.tokens
        assert completion.num_prompt_tokens == len(self.prompt)
        assert completion.logprobs is not None
        for index, (token, given) in enumerate(zip(self.tokens, completion.logprobs, strict=True)):
            row = self._logprobs[index]
            assert given.logprob == pytest.approx(float(row[token]), abs=tolerance)
            best = row.topk(len(given.top)).values.tolist()
            assert [value for _, value in given.top] == pytest.approx(best, abs=tolerance)


def check_all(truths: Iterable[Truth], completions: Iterable[Completion]) -> None:
    """Every answer is the truth."""
    for truth, completion in zip(truths, completions, strict=True):
        truth.check(completion)
