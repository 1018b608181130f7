"""A prompt, as a model reads it."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """Token ids, and what is known of others that begin alike."""

    token_ids: list[int]
    boundaries: tuple[int, ...] = ()
    """Lengths, in tokens, from where other prompts will go on."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer to it, other than the model's own: those that end a turn of a chat."""
