"""A prompt: as a model reads it, and as the manager does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.protocol.tokens import input_digest
from kvpool.v1 import common_pb2, worker_pb2


class Prompt(NamedTuple):
    """Token ids of a prompt, with what its request adds."""

    token_ids: list[int]
    boundaries: tuple[int, ...] = ()
    """Lengths, in tokens, after which other prompts will continue differently."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer in addition to the model's own: those that end a turn of a chat."""


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """An encoder that reads the prompt, while the decoder begins every text with tokens of its own."""

    max_tokens: int
    """Tokens of the longest prompt."""
    decoder_prompt: tuple[int, ...]
    """Tokens that every text of the decoder begins with; not part of an answer."""

    @classmethod
    def of(cls, facts: worker_pb2.ModelFacts) -> EncoderModel | None:
        """Decode a worker's facts; None: the prompt is the beginning of the text."""
        if not facts.is_encoder_decoder:
            return None
        forced = (facts.forced_bos_token_id,) if facts.HasField("forced_bos_token_id") else ()
        return cls(facts.max_encoder_tokens, (facts.decoder_start_token_id, *forced))


class RoutedPrompt(NamedTuple):
    """The prompt in a call of Route or Explain: the first tokens of a text, and the digest of an encoder's input."""

    root: common_pb2.Root
    token_ids: list[int]
    """Tokens that the text begins with."""
    num_encoder_tokens: int
    """Tokens of the encoder's input; 0: there is no encoder."""


def routed_prompt(
    root: common_pb2.Root, encoder: EncoderModel | None, prompt: Sequence[int], delivered: Sequence[int] = ()
) -> RoutedPrompt:
    """Combine a prompt with the `delivered` tokens of its answer. `root` is without an input."""
    if encoder is None:
        return RoutedPrompt(root, [*prompt, *delivered], 0)
    named = common_pb2.Root(input_digest=input_digest(prompt))
    named.MergeFrom(root)
    return RoutedPrompt(named, [*encoder.decoder_prompt, *delivered], len(prompt))
