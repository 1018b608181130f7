"""The records of one request and of one run. Times are seconds on one monotonic clock."""

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
    turn: int
    """Number of the turn in its conversation, from 1."""
    due: float
    """Time at which it was due to be sent."""
    num_prompt_tokens: int
    num_cached_tokens: int | None = None
    """Prompt tokens served from the cache; None: the engine did not report it."""
    arrived: list[Arrived] = field(default_factory=list)
    is_complete: bool = False
    """Whether all tokens came."""
    refusal: str | None = None
    """Error of an engine that was full; None: it did not refuse."""

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that came."""
        return sum(arrived.num_tokens for arrived in self.arrived)

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the time at which it was due to the first token. There must be a token."""
        return self.arrived[0].at - self.due

    @property
    def end_to_end(self) -> float:
        """Seconds from the time at which it was due to the last token. There must be a token."""
        return self.arrived[-1].at - self.due

    def inter_token(self) -> list[float]:
        """Return a gap in seconds for each token after the first delivery. n tokens that arrive together count as n gaps of pause /
        n."""
        gaps: list[float] = []
        for before, after in itertools.pairwise(self.arrived):
            gaps += [(after.at - before.at) / after.num_tokens] * after.num_tokens
        return gaps


@dataclass(slots=True)
class LoadRun:
    """The record of one run: all conversations of a workload, once."""

    seconds: float
    """Time from the first due request to the end of the last one."""
    samples: list[RequestSample]
    num_planned: int
    """Requests that the workload has."""
    error: Exception | None = None
    """Error that ended the run early; None: it is complete."""
    waste: list[WasteSample] = field(default_factory=list)
    """Samples of the blocks during the run; empty if they were not asked for."""

    @property
    def complete(self) -> list[RequestSample]:
        """The requests whose tokens all came; only these count."""
        return [sample for sample in self.samples if sample.is_complete]

    @property
    def num_refused(self) -> int:
        """Requests that the engine did not take, because it was full."""
        return sum(1 for sample in self.samples if sample.refusal is not None)
