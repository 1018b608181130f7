"""What is noted of one request, and of one run. Times are seconds on one monotonic clock."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

from .waste import WasteSample


class Arrived(NamedTuple):
    """Tokens that came together."""

    at: float
    num_tokens: int


@dataclass(slots=True)
class RequestSample:
    """One request."""

    turn: int
    """Of its conversation, from 1."""
    due: float
    """When it was to be sent."""
    num_prompt_tokens: int
    num_cached_tokens: int | None = None
    """Prompt tokens served from the cache; None: the engine did not say."""
    arrived: list[Arrived] = field(default_factory=list)
    is_complete: bool = False
    """All tokens came."""
    refusal: str | None = None
    """What the engine said instead of an answer because it was full."""

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that came."""
        return sum(arrived.num_tokens for arrived in self.arrived)

    @property
    def time_to_first_token(self) -> float:
        """From when it was due. There must be a token."""
        return self.arrived[0].at - self.due

    @property
    def end_to_end(self) -> float:
        """From when it was due to the last token. There must be one."""
        return self.arrived[-1].at - self.due

    def inter_token(self) -> list[float]:
        """One time for each token after the first delivery: where n came together after a pause, n times a n-th of the pause."""
        gaps: list[float] = []
        for before, after in itertools.pairwise(self.arrived):
            gaps += [(after.at - before.at) / after.num_tokens] * after.num_tokens
        return gaps


@dataclass(slots=True)
class Run:
    """All conversations of a workload, once."""

    seconds: float
    """From the first request due to the end of the last one."""
    samples: list[RequestSample]
    num_planned: int
    """Requests that there were to be."""
    error: Exception | None = None
    """What ended the run before its time."""
    waste: list[WasteSample] = field(default_factory=list)
    """What was seen of the blocks meanwhile, if it was asked for."""

    @property
    def complete(self) -> list[RequestSample]:
        """The requests that count: all their tokens came."""
        return [sample for sample in self.samples if sample.is_complete]

    @property
    def num_refused(self) -> int:
        """Requests that the engine did not take, because it was full."""
        return sum(1 for sample in self.samples if sample.refusal is not None)
