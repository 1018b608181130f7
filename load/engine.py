"""The interface of an engine under load."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """Facts about the served model that a workload needs."""

    model: str
    """Name of the model for people."""
    vocabulary: Sequence[int]
    """Ids of ordinary tokens, without special ones and ends of text."""
    max_model_len: int
    """Most tokens of prompt and answer together."""


class Delivery(NamedTuple):
    """Tokens that came at one moment; there are none if it only reports cached tokens."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int | None
    """Prompt tokens that the cache served; None: unknown, perhaps only so far."""


class RefusedRequest(Exception):
    """The engine is full and does not take this request; others may go on."""


class EngineUnderLoad(Protocol):
    """An engine under load. All methods are called in one event loop."""

    async def served(self) -> ServedRequest:
        """Return the facts about the served model. Called once, before the load."""
        ...

    def generate(self, prompt: Sequence[int], num_tokens: int) -> AsyncGenerator[Delivery, None]:
        """Yield exactly `num_tokens` greedy tokens after the prompt, past any end of text, as they come. Closing the generator ends
        the request. Raises RefusedRequest, or any other error, which ends the run."""
        ...

    async def close(self) -> None:
        """Release the engine. May be repeated."""
        ...
