"""What the engine hands to the model side, and what it gets back: plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of one sequence is chosen."""

    temperature: float = 0.0
    """0: greedy. Otherwise logits are divided by it before truncation."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1: all."""
    seed: int = 0
    """With the position of the token, decides the draw (0 … 2**64 − 1)."""
    num_logprobs: int | None = None
    """None: no log-probabilities; 0: of the sampled token; n: also of the n most likely tokens."""


class SequencePart(NamedTuple):
    """One sequence's part of a step: forward `token_ids` at positions start, start + 1, …

    KV of positions 0 … start − 1 is in the blocks already; the step writes that of the new positions.
    """

    token_ids: list[int]
    """Tokens to forward: one for a decode, a chunk for a prefill. Never empty."""
    start: int
    """Position of token_ids[0] in the sequence."""
    block_table: list[int]
    """Block ids of the sequence from position 0, covering at least start + len(token_ids) positions."""
    sampling: SamplingParams | None
    """How to sample the token behind the last one; None in the middle of a prefill: no logits are computed."""


class Step(NamedTuple):
    """One forward pass over the parts of several sequences, prefill chunks and decodes mixed. No sequence occurs twice."""

    parts: list[SequencePart]


class SampledToken(NamedTuple):
    """The token that follows a sequence's part."""

    token_id: int
    logprob: float | None
    """Natural log-probability under the model (temperature 1, no truncation) if it was asked for."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, best first, as many as were asked for."""


class StepRunner(Protocol):
    """The model as the engine sees it. Blocking; called from one thread, one step at a time."""

    def execute(self, step: Step) -> list[SampledToken | None]:
        """Run the step and sample. One entry per part, None where the part asked for no token."""
        ...
