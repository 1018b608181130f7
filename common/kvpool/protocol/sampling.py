"""How the next token of a sequence is chosen: the fields of the message SamplingParams, with their defaults and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from kvpool.v1 import worker_pb2


class Range(NamedTuple):
    """Numbers that a field may have. NaN is in no range."""

    smallest: float
    largest: float
    excludes_smallest: bool = False

    def holds(self, value: float) -> bool:
        """Whether the field may have that value."""
        return self.smallest <= value <= self.largest and not (self.excludes_smallest and value == self.smallest)

    def __str__(self) -> str:
        return f"{'(' if self.excludes_smallest else '['}{self.smallest:g}, {self.largest:g}]"


def _within(smallest: float, largest: float, *, excludes_smallest: bool = False) -> dict[str, Range]:
    return {"range": Range(smallest, largest, excludes_smallest)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters in the order of their use: logit_bias, penalties, ids that must not or must follow, temperature, top_k, top_p,
    min_p. Whole numbers have the range of their type on the wire."""

    temperature: float = field(default=0.0, metadata=_within(0, 100))
    """0: greedy. Otherwise logits are divided by it before truncation."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = field(default=1.0, metadata=_within(0, 1, excludes_smallest=True))
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1: all."""
    min_p: float = field(default=0.0, metadata=_within(0, 1))
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0: none."""
    seed: int = 0
    """With the position of the token, decides the draw (0 … 2**64 − 1)."""
    repetition_penalty: float = field(default=1.0, metadata=_within(0, 10, excludes_smallest=True))
    """Logits of tokens that occur in prompt or answer are divided by it if positive, else multiplied; 1: none."""
    presence_penalty: float = field(default=0.0, metadata=_within(-2, 2))
    """Subtracted from the logits of tokens that occur in the answer."""
    frequency_penalty: float = field(default=0.0, metadata=_within(-2, 2))
    """Subtracted from a token's logit as often as it occurs in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata=_within(-100, 100))
    """Token id → what is added to its logit."""
    no_repeat_ngram_size: int = 0
    """No run of that many tokens occurs twice; 0: any may."""
    encoder_no_repeat_ngram_size: int = 0
    """No run of that many tokens of the prompt occurs in the answer; 0: any may."""
    suppress_tokens: tuple[int, ...] = ()
    """Ids that are never drawn."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Ids that are not drawn as the first token of an answer."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Runs of ids that the answer does not complete."""
    forced_eos_token_id: tuple[int, ...] = ()
    """Ids of which one is the last token of an answer that its length ends; none: any may be."""

    @property
    def has_rules(self) -> bool:
        """Whether some ids must not, or must, follow."""
        return bool(
            self.no_repeat_ngram_size
            or self.encoder_no_repeat_ngram_size
            or self.suppress_tokens
            or self.begin_suppress_tokens
            or self.bad_words_ids
            or self.forced_eos_token_id
        )

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens the sequence holds."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


RANGES: Final[Mapping[str, Range]] = {
    entry.name: entry.metadata["range"] for entry in fields(Sampling) if "range" in entry.metadata
}
"""By field; that of logit_bias is of each bias."""


def sampling_fields(message: worker_pb2.SamplingParams) -> dict[str, Any]:
    """The message as keyword arguments of Sampling. Fields that are unset or zero are left out: their default is the same."""
    found: dict[str, Any] = {entry.name: value for entry, value in message.ListFields()}
    for name, value in found.items():
        if isinstance(value, worker_pb2.TokenIds):
            found[name] = tuple(value.ids)
        elif isinstance(value, worker_pb2.TokenIdLists):
            found[name] = tuple(tuple(one.ids) for one in value.lists)
    return found | {"logit_bias": dict(message.logit_bias)}
