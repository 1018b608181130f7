"""The table of sampling options: what callers may give, and the fields of the message SamplingParams with defaults and ranges.

A new option is a field of `SamplingOptions`, one of `Sampling` and one of the message. The client, the command line, the gateway
and what a worker reads of generation_config.json take it from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, TypedDict

from kvpool.v1 import worker_pb2


class SamplingOptions(TypedDict, total=False):
    """Options of callers that say how the next token is chosen, all optional."""

    temperature: float
    """Logits are divided by it; at most 100. 0, the default: always the most likely token."""
    top_k: int
    """Keep the k most likely tokens; 0, the default: all."""
    top_p: float
    """Keep the smallest set of most likely tokens whose probabilities sum to at least top_p; 1, the default: all."""
    min_p: float
    """Drop tokens whose probability is less than min_p times that of the most likely one; 0, the default: none."""
    repetition_penalty: float
    """Factor in (0, 10] by which the logits of tokens in prompt or answer are divided if positive, else multiplied; 1, the default:
    none."""
    presence_penalty: float
    """Amount to subtract from the logits of tokens that occur in the answer, in [-2, 2]; 0, the default: none."""
    frequency_penalty: float
    """Amount to subtract from a token's logit for each time that it occurs in the answer, in [-2, 2]; 0, the default: none."""
    logit_bias: Mapping[int, float]
    """Amount to add to the logit of each token id, in [-100, 100]; at most 1,024 ids."""
    seed: int | None
    """0 … 2**64 − 1; the same seed gives the same text. None: a random one."""
    no_repeat_ngram_size: int
    """No run of that many tokens occurs twice in prompt and answer together; 0, the default: any may."""
    encoder_no_repeat_ngram_size: int
    """No run of that many tokens of the prompt occurs in the answer; 0, the default: any may."""
    bad_words_ids: Sequence[Sequence[int]]
    """Runs of ids that the answer never completes; none by default."""
    suppress_tokens: Sequence[int]
    """Ids that are never drawn; none by default. At most 4,096, begin_suppress_tokens, bad_words_ids and forced_eos_token_id
    included."""
    begin_suppress_tokens: Sequence[int]
    """Ids that are never drawn as the first token of an answer; none by default."""
    forced_eos_token_id: int | Sequence[int]
    """Id, or several of which one is chosen, that is the last token of an answer which ends by its length; none by default."""


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


class SamplingOption(NamedTuple):
    """What the components need to know of an option besides its type."""

    default: Any
    allowed: Range | None = None
    """Range of its number, or of each bias of logit_bias; None: that of the type on the wire."""
    help: str = ""
    """Sentence for its flag on the command line; empty: there is none."""
    is_of_files: bool = True
    """Whether generation_config.json has a field of this name, which gives it another default."""


def _option(default: Any, allowed: Range | None = None, help: str = "", *, is_of_files: bool = True) -> Any:
    option = SamplingOption(default, allowed, help, is_of_files)
    # A mapping cannot be hashed, and dataclasses take that for a sign that instances would share it.
    value: Any = {"default_factory": dict} if default == {} else {"default": default}
    return field(**value, metadata={"option": option})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token of a sequence is chosen: the options, each with a value. They apply in this order: logit_bias, penalties,
    forbidden and forced ids, temperature, top_k, top_p, min_p."""

    temperature: float = _option(0.0, Range(0, 100), "0: always the most likely token.")
    top_k: int = _option(0, None, "Keep the k most likely tokens; 0: all.")
    top_p: float = _option(1.0, Range(0, 1, True), "Keep the most likely tokens up to this probability.")
    min_p: float = _option(0.0, Range(0, 1), "Drop tokens less likely than this share of the most likely one.")
    repetition_penalty: float = _option(
        1.0, Range(0, 10, True), "Above 1: what prompt or answer holds becomes less likely."
    )
    presence_penalty: float = _option(
        0.0, Range(-2, 2), "Taken off the logits of what the answer holds.", is_of_files=False
    )
    frequency_penalty: float = _option(
        0.0, Range(-2, 2), "Taken off for each time that the answer holds it.", is_of_files=False
    )
    logit_bias: Mapping[int, float] = _option(
        {}, Range(-100, 100), "Added to the logit of a token id; may be repeated.", is_of_files=False
    )
    seed: int = _option(0, None, "Same seed, same text. Default: a random one.", is_of_files=False)
    """Decides the draw together with the position of the token."""
    no_repeat_ngram_size: int = _option(
        0, None, "No run of that many tokens occurs twice, in prompt and answer; 0: any may."
    )
    encoder_no_repeat_ngram_size: int = _option(0)
    bad_words_ids: tuple[tuple[int, ...], ...] = _option(())
    suppress_tokens: tuple[int, ...] = _option(())
    begin_suppress_tokens: tuple[int, ...] = _option(())
    forced_eos_token_id: tuple[int, ...] = _option(())

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


SAMPLING_OPTIONS: Final[Mapping[str, SamplingOption]] = {
    entry.name: entry.metadata["option"] for entry in fields(Sampling)
}


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
