"""Rates out of what the manager's Describe counts: differences between looks, over the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.v1 import cache_pb2

WINDOW_SECONDS: Final = 5.0
"""A worker states its tokens block by block, so what a second brings is all or nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one worker."""

    prompt_tokens: float
    """Per second, as the others; with those that the cache served."""
    generated_tokens: float
    evicted_blocks: float
    hit_rate: float | None
    """Share of the prompt tokens that the cache served; None where no prompt came in."""


class _Look(NamedTuple):
    at: float
    workers: dict[int, cache_pb2.WorkerTotals]
    """By session: counts begin anew with each."""


class RateMeter:
    """Remembers some looks and compares the newest with the oldest."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque()

    def add(self, response: cache_pb2.DescribeResponse, now: float) -> None:
        """A look at `now`, in seconds of a clock that only goes forward."""
        looks = self._looks
        looks.append(_Look(now, {worker.session: worker.totals for worker in response.workers}))
        # One that is older than the window stays while it is all there is to compare with.
        while len(looks) > 2 and looks[1].at <= now - WINDOW_SECONDS:
            looks.popleft()

    def rates(self, session: int) -> Rates | None:
        """Since the oldest look that knows the session; None if only the newest does."""
        newest = self._looks[-1] if self._looks else None
        if newest is None or session not in newest.workers:
            return None
        oldest = next(look for look in self._looks if session in look.workers)
        seconds = newest.at - oldest.at
        if seconds <= 0:
            return None
        now, before = newest.workers[session], oldest.workers[session]
        prompts = now.num_prompt_tokens - before.num_prompt_tokens
        cached = now.num_cached_tokens - before.num_cached_tokens
        return Rates(
            prompt_tokens=prompts / seconds,
            generated_tokens=(now.num_generated_tokens - before.num_generated_tokens) / seconds,
            evicted_blocks=(now.num_evicted_blocks - before.num_evicted_blocks) / seconds,
            hit_rate=cached / prompts if prompts else None,
        )
