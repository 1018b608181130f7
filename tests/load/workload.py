"""Requests for a cluster under load, and their reference answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvpool.client import GenerateOptions


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be continued."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: GenerateOptions
    """Empty: greedy."""

    def options(self, salt: str, max_tokens: int | None = None) -> GenerateOptions:
        """For `Client.generate`. Requests with different salts share no blocks and have the same answer."""
        asked = self.max_tokens if max_tokens is None else max_tokens
        return self.sampling | GenerateOptions(max_tokens=asked, ignore_eos=True, tenant_salt=salt)


@dataclass(frozen=True)
class Reference:
    request: Request
    token_ids: tuple[int, ...]
    """As many as the request's `max_tokens`."""
    text: str | None = None
    """None: not known."""


@dataclass(frozen=True)
class Call:
    reference: Reference
    max_tokens: int
    """At most the request's."""
    options: GenerateOptions
    """For `Client.generate`."""
    leaves_after: int | None = None
    """Tokens after which the reader cancels the stream; None: it reads all."""


def make_prompts(
    tokens: range,
    family_lengths: Sequence[int],
    own_length: Callable[[], int],
    max_length: int,
    draw: random.Random,
) -> Iterator[tuple[int, ...]]:
    """Prompts without end, in pairs of the same family: no common beginning, then one of each length in turn."""
    families = [[], *(draw.choices(tokens, k=length) for length in family_lengths)]
    while True:
        for family in families:
            for _ in range(2):
                count = min(own_length(), max_length - len(family))
                yield (*family, *draw.choices(tokens, k=count))
