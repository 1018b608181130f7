"""What the engine hands to the model side, and what it gets back: plain data, no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from .sampling_params import SamplingParams, TokenLogprobs
from .token_counts import TokenCounts


class PromptRows(NamedTuple):
    """Tokens of a part behind which the prompt goes on, and what is to be told of the tokens that follow them there."""

    first: int
    """Index in token_ids of the first of them."""
    targets: list[int]
    """For each, from `first` on, the token that the prompt has behind it. Never empty."""
    num_top: int
    """So many of the most likely tokens are told beside each target."""


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
    banned_ids: Collection[int] = ()
    """Ids that must not be sampled now: those that would end a text that is still too short."""
    counts: TokenCounts | None = None
    """Which tokens the sequence holds; given if `sampling` has penalties."""
    prompt_rows: PromptRows | None = None
    """Where log-probabilities of the prompt are wanted."""


class Step(NamedTuple):
    """One forward pass over the parts of several sequences, prefill chunks and decodes mixed. No sequence occurs twice."""

    parts: list[SequencePart]


class SampledToken(NamedTuple):
    """The token that follows a sequence's part."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """If they were asked for."""


class BadLogits(NamedTuple):
    """Logits by which no token can be chosen or told of, since the largest of them is no finite number.

    Also those that nobody wants, in the middle of a prefill, where the model computes no finite numbers: what is behind the token
    attends to its KV, and so would everybody who shares the prefix.
    """

    position: int
    """Absolute position of the token that they are for."""
    largest: float
    """NaN if one of them is; inf; −inf if all of them are."""
    is_adjusted: bool = False
    """Whether the model's own are good, and the request's bias, banned ids or penalties have made these of them."""


class PartResult(NamedTuple):
    """What came of one part of a step."""

    token: SampledToken | None = None
    """None where the part asked for none."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One for each of the part's prompt_rows."""
    bad_logits: BadLogits | None = None
    """If given, nothing else came of the part: its request cannot go on. The other parts of the step are not concerned."""


class StepRunner(Protocol):
    """The model as the engine sees it. Blocking; called from one thread, one step at a time."""

    def execute(self, step: Step) -> list[PartResult]:
        """Run the step and sample. One entry per part. An exception is the failure of all parts."""
        ...
