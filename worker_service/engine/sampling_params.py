"""How tokens are sampled, and the log-probabilities that come with them: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool.protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """How the next token of one sequence is chosen and reported. The model side uses it (model/sampling/sampler.py)."""

    num_logprobs: int | None = None
    """None: no log-probabilities; 0: of the sampled token; n: also of the n most likely tokens."""


class RowLogprobs(NamedTuple):
    """Natural log-probabilities under the model (temperature 1, no penalties, no truncation)."""

    logprob: float
    """Log-probability of the actual token."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, best first."""
