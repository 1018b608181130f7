"""A step: the model side's input and output. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvpool.protocol.sampling import Sampling

from .cache.entry import BlockCopy as BlockCopy
from .cache.entry import StateBlocks as StateBlocks
from .token_counts import TokenCounts


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


class PromptRows(NamedTuple):
    """Positions of a part whose next token is in the prompt, and whose next-token log-probabilities were requested."""

    first: int
    """Index in token_ids of the first of them."""
    targets: list[int]
    """The next token of each position, from `first` on. Never empty."""
    num_top: int
    """Number of most likely tokens to return with each target."""


class EncoderBlocks(NamedTuple):
    """The blocks with the KV of an encoder's output, to which a decoder's cross attention attends."""

    table: list[int]
    """Block ids of the cross group, covering num_tokens positions of the encoder's input."""
    num_tokens: int
    token_ids: Sequence[int] = ()
    """The encoder's input, if it is to run and the blocks are to be written first; empty: they hold its KV."""


class SequencePart(NamedTuple):
    """One sequence's part of a step: forward `token_ids` at positions start, start + 1, …

    The blocks hold the KV of positions 0 … start − 1; the step writes that of the new ones.
    """

    token_ids: list[int]
    """Tokens to forward: one for a decode, a chunk for a prefill. Never empty."""
    start: int
    """Position of token_ids[0] in the sequence."""
    block_tables: tuple[list[int], ...]
    """One table for each group of layers: block ids of the sequence from position 0, covering at least start + len(token_ids)
    positions.

    In a group with a window, entries of blocks that lie wholly before the window of token_ids[0] are never read: they may be 0, and
    their blocks may hold later positions of this sequence, or other sequences.
    """
    sampling: SamplingParams | None = None
    """How to sample the token after the last one; None in the middle of a prefill: no logits are computed."""
    banned_ids: Collection[int] = ()
    """Ids that must not be sampled now."""
    forced_ids: Sequence[int] = ()
    """Ids of which one must be sampled now, unless it is banned; none: any may be."""
    counts: TokenCounts | None = None
    """The sequence's tokens; set if `sampling` has penalties."""
    prompt_rows: PromptRows | None = None
    forks: Sequence[SamplingParams] = ()
    """Further tokens to sample after the last one, each in its own way: the first tokens of forks. Only with `sampling`."""
    num_candidates: int = 0
    """Most likely next tokens to return, of which a beam search chooses, in place of a sampled one; 0: none. Only with `sampling`,
    whose temperature and truncation do not count."""
    state: StateBlocks | None = None
    """Blocks of the running state; None: the model has no recurrent layers."""
    encoder: EncoderBlocks | None = None
    """Blocks of the encoder's output; None: the model has no encoder."""

    @property
    def block_table(self) -> list[int]:
        """The block table of the first group."""
        return self.block_tables[0]


class Step(NamedTuple):
    """One forward pass over parts of different sequences, prefill chunks and decodes mixed."""

    parts: list[SequencePart]
    copies: Sequence[BlockCopy] = ()
    """Copies to make in this order, before anything of the step is computed or written; no block is the target of two."""


class SampledToken(NamedTuple):
    """The token after a sequence's part."""

    token_id: int
    logprobs: RowLogprobs | None = None
    """None: they were not requested."""


class BeamCandidate(NamedTuple):
    """A token that a beam may continue with."""

    token_id: int
    score: float
    """Its log-probability, adjusted by bias, penalties, forced and banned ids."""
    logprob: float
    """Its log-probability under the model."""


class BeamCandidates(NamedTuple):
    """What a beam may continue with."""

    best: Sequence[BeamCandidate]
    """The tokens with the best scores, best first: as many as were asked for, or all if there are fewer."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most likely tokens, as in RowLogprobs; empty unless log-probabilities are requested."""


class BadLogits(NamedTuple):
    """Logits without a finite maximum, from which no token or log-probability follows.

    Reported also in the middle of a prefill, where no logits are needed: later tokens attend to that KV, and so would every
    request that shares the prefix.
    """

    position: int
    """Absolute position of the token that they are for."""
    largest: float
    """NaN if any is NaN; inf; −inf if all are."""
    is_adjusted: bool = False
    """Whether the model's own logits are good, and the request's bias, banned ids or penalties have made them bad."""


class PartResult(NamedTuple):
    """The result of one part of a step."""

    token: SampledToken | None = None
    """None if the part does not sample."""
    prompt_logprobs: Sequence[RowLogprobs] = ()
    """Log-probabilities, one for each of the part's prompt_rows."""
    bad_logits: BadLogits | None = None
    """If set, the request cannot continue and there is no other result. Other parts are not affected."""
    forks: Sequence[SampledToken] = ()
    """First tokens of forks, one for each of the part's forks."""
    candidates: BeamCandidates | None = None
    """The candidates, in place of the token, if the part asks for them."""


class StepRunner(Protocol):
    """The model, for the engine. Blocking; called from one thread, one step at a time."""

    def execute(self, step: Step) -> list[PartResult]:
        """Run the step and sample. Returns one result per part. An exception fails all parts."""
