"""What the engine knows of a model whose prompt feeds an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .errors import invalid


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Limits of the encoder's input, and how every text of the decoder begins."""

    max_tokens: int
    """Tokens of the encoder's longest input."""
    vocab_size: int
    """Ids of the input are below this."""
    decoder_prompt: tuple[int, ...]
    """The ids that every text of the decoder begins with. At least one; they are no part of the answer."""


class SplitPrompt(NamedTuple):
    """A prompt as the two parts of the model take it."""

    token_ids: list[int]
    """The beginning of the text: the prompt, or what the decoder begins with and what was delivered of it."""
    encoder_token_ids: list[int]
    """Empty without an encoder."""


def split(token_ids: list[int], num_delivered: int, encoder: EncoderSettings | None) -> SplitPrompt:
    """Split a prompt, which ends with the delivered tokens."""
    if encoder is None:
        return SplitPrompt(token_ids, [])
    end = len(token_ids) - num_delivered
    return SplitPrompt([*encoder.decoder_prompt, *token_ids[end:]], token_ids[:end])


def check_input(token_ids: Sequence[int], encoder: EncoderSettings | None) -> None:
    """Raises EngineError if the model has no encoder and gets an input for one, or has one and gets none, or ids out of range."""
    if encoder is None:
        if token_ids:
            raise invalid("prompt", "this model has no encoder, and was given an input for one")
        return
    if not token_ids:
        raise invalid("prompt", "needed at least one token for the encoder, got none")
    if len(token_ids) > encoder.max_tokens:
        raise invalid("prompt", too_long(len(token_ids), encoder))
    if max(token_ids) >= encoder.vocab_size or min(token_ids) < 0:
        raise invalid(
            "prompt", f"token id {max(token_ids)} is outside the encoder's vocabulary of {encoder.vocab_size} tokens"
        )


def too_long(num_tokens: int, encoder: EncoderSettings) -> str:
    """Why an input is refused, in words."""
    return (
        f"{num_tokens} tokens are more than the encoder takes on this worker, which is {encoder.max_tokens}: shorten the prompt, "
        "or start the workers with a larger --max-encoder-tokens if the model allows it"
    )
