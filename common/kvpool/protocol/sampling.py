"""The fields of the message SamplingParams, with their defaults and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from kvpool.v1 import worker_pb2


class Range(NamedTuple):
    """The numbers that a field may have. NaN is in no range."""

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
    """How the next token of a sequence is chosen. Parameters apply in this order: logit_bias, penalties, forbidden and forced ids,
    temperature, top_k, top_p, min_p. Integers have the range of their type on the wire."""

    temperature: float = field(default=0.0, metadata=_within(0, 100))
    """0: greedy. Otherwise logits are divided by it before truncation."""
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = field(default=1.0, metadata=_within(0, 1, excludes_smallest=True))
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1: all."""
    min_p: float = field(default=0.0, metadata=_within(0, 1))
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0: none."""
    seed: int = 0
    """Decides the draw together with the position of the token; 0 … 2**64 − 1."""
    repetition_penalty: float = field(default=1.0, metadata=_within(0, 10, excludes_smallest=True))
    """Factor by which the logits of tokens in prompt or answer are divided if positive, else multiplied; 1: none."""
    presence_penalty: float = field(default=0.0, metadata=_within(-2, 2))
    """Amount to subtract from the logits of tokens that occur in the answer; 0: none."""
    frequency_penalty: float = field(default=0.0, metadata=_within(-2, 2))
    """Amount to subtract from a token's logit for each time that it occurs in the answer; 0: none."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, metadata=_within(-100, 100))
    """Amount to add to the logit of each token id."""
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
        """Whether some ids are forbidden or forced."""
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
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


RANGES: Final[Mapping[str, Range]] = {
    entry.name: entry.metadata["range"] for entry in fields(Sampling) if "range" in entry.metadata
}
"""Range of each field; that of logit_bias is for each bias."""


def sampling_fields(message: worker_pb2.SamplingParams) -> dict[str, Any]:
    """Return the message as keyword arguments of Sampling. Fields that are unset or zero are left out: their default is the
    same."""
    arguments: dict[str, Any] = {entry.name: value for entry, value in message.ListFields()}
    for name, value in arguments.items():
        if isinstance(value, worker_pb2.TokenIds):
            arguments[name] = tuple(value.ids)
        elif isinstance(value, worker_pb2.TokenIdLists):
            arguments[name] = tuple(tuple(words.ids) for words in value.lists)
    return arguments | {"logit_bias": dict(message.logit_bias)}
