"""A prompt, as a model reads it."""

from __future__ import annotations

from typing import NamedTuple


class Prompt(NamedTuple):
    """Token ids of a prompt, with what its request adds."""

    token_ids: list[int]
    boundaries: tuple[int, ...] = ()
    """Lengths, in tokens, after which other prompts will continue differently."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer in addition to the model's own: those that end a turn of a chat."""
