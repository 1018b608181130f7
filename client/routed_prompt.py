"""A prompt as the manager knows it: the beginning of a text, and the input of an encoder by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.protocol.tokens import input_digest
from kvpool.v1 import common_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """Of a model whose prompt feeds an encoder, while its decoder begins every text with tokens of its own."""

    max_tokens: int
    """Of the longest prompt."""
    decoder_prompt: tuple[int, ...]
    """What every text begins with; no part of an answer."""

    @classmethod
    def of(cls, facts: worker_pb2.ModelFacts) -> EncoderModel | None:
        """From a worker's facts; None: the prompt is the beginning of the text."""
        if not facts.is_encoder_decoder:
            return None
        forced = (facts.forced_bos_token_id,) if facts.HasField("forced_bos_token_id") else ()
        return cls(facts.max_encoder_tokens, (facts.decoder_start_token_id, *forced))


class RoutedPrompt(NamedTuple):
    """What Route and Explain are asked with."""

    root: common_pb2.Root
    token_ids: list[int]
    """How the text begins."""
    num_encoder_tokens: int
    """0: without an encoder."""


def routed_prompt(
    root: common_pb2.Root, encoder: EncoderModel | None, prompt: Sequence[int], delivered: Sequence[int] = ()
) -> RoutedPrompt:
    """A prompt, and the tokens of the answer that were delivered. `root`: without an input."""
    if encoder is None:
        return RoutedPrompt(root, [*prompt, *delivered], 0)
    named = common_pb2.Root(input_digest=input_digest(prompt))
    named.MergeFrom(root)
    return RoutedPrompt(named, [*encoder.decoder_prompt, *delivered], len(prompt))
