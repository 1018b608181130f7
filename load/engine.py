"""What can be put under load: an engine, by three methods."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What an engine serves, as far as a workload needs it."""

    model: str
    """As people know it."""
    vocabulary: Sequence[int]
    """Ordinary tokens: neither special ones nor ends of text."""
    max_model_len: int
    """Prompt and answer together, in tokens."""


class Delivery(NamedTuple):
    """Tokens that came at one moment; or none, and what was cached."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int | None
    """Prompt tokens that the cache served; None where it is not known (yet)."""


class RefusedRequest(Exception):
    """The engine is full and does not take this request; others may go on."""


class EngineUnderLoad(Protocol):
    """An engine under load. All methods are called in one event loop."""

    async def served(self) -> ServedRequest:
        """What it serves; once, before the load."""
        ...

    def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """Exactly `num_tokens` greedy tokens after the prompt, past any end of text, as they come. Closing the generator ends the
        request. Raises Refused, or any other error, which ends the run."""
        ...

    async def close(self) -> None:
        """Let go of it. May be repeated."""
        ...
