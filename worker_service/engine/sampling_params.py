"""How tokens are sampled, and the log-probabilities that come with them: plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one sequence is chosen; for the order of operations see model/sampling/sampler.py."""

    temperature: float = 0.0
    """0: greedy. Otherwise logits are divided by it before truncation."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1: all."""
    min_p: float = 0.0
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0: none."""
    seed: int = 0
    """The draw depends on it and on the token's position (0 … 2**64 − 1)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that occur in prompt or answer are divided by it if positive, else multiplied; 1: none."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as it occurs in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id → value added to its logit."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: of the sampled token; n: also of the n most likely tokens."""

    @property
    def has_penalties(self) -> bool:
        """Whether the result depends on which tokens the sequence holds."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class TokenLogprobs(NamedTuple):
    """Natural log-probabilities under the model (temperature 1, no penalties, no truncation)."""

    logprob: float
    """Of the actual token."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, best first."""
