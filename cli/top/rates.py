"""Computes rates from the counts in the manager's Describe: differences between looks, over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvpool.v1 import cache_pb2

WINDOW_SECONDS: Final = 5.0
"""Time over which rates are averaged. A worker reports its tokens block by block, so a single second shows all or nothing."""

SequenceName = tuple[int, str, int]
"""Session, sequence_id and attempt. The round does not count: a sequence that is granted again keeps its tokens."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one worker, per second."""

    prompt_tokens: float
    """Prompt tokens, those that the cache served included."""
    generated_tokens: float
    evicted_blocks: float
    hit_rate: float | None
    """Share of the prompt tokens that the cache served; None: no prompt came in."""


_Name = TypeVar("_Name", bound=Hashable)
_Counts = TypeVar("_Counts")


class _Looks(Generic[_Name, _Counts]):
    """Recent looks at things that come and go, of which the newest is compared with the oldest."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[_Name, _Counts]]] = deque()

    def add(self, counts: dict[_Name, _Counts], now: float) -> None:
        looks = self._looks
        looks.append((now, counts))
        # One that is older than the window stays while it is all there is to compare with.
        while len(looks) > 2 and looks[1][0] <= now - WINDOW_SECONDS:
            looks.popleft()

    def change(self, name: _Name) -> tuple[_Counts, _Counts, float] | None:
        """Return the counts in the oldest look that has the name and in the newest look, and the seconds between; None: only the
        newest has it, or none does."""
        if not self._looks:
            return None
        newest_at, newest = self._looks[-1]
        if name not in newest:
            return None
        oldest_at, oldest = next(look for look in self._looks if name in look[1])
        seconds = newest_at - oldest_at
        return (oldest[name], newest[name], seconds) if seconds > 0 else None


class RateMeter:
    """Remembers some looks at the workers and compares the newest with the oldest."""

    def __init__(self) -> None:
        self._looks: _Looks[int, cache_pb2.WorkerTotals] = _Looks()

    def add(self, response: cache_pb2.DescribeResponse, now: float) -> None:
        """Add a look at `now`, in monotonic seconds."""
        # By session: each begins at zero.
        self._looks.add({worker.session: worker.totals for worker in response.workers}, now)

    def rates(self, session: int) -> Rates | None:
        """Return the rates since the oldest look that has the session; None: only the newest has it."""
        change = self._looks.change(session)
        if change is None:
            return None
        before, now, seconds = change
        prompts = now.num_prompt_tokens - before.num_prompt_tokens
        cached = now.num_cached_tokens - before.num_cached_tokens
        return Rates(
            prompt_tokens=prompts / seconds,
            generated_tokens=(now.num_generated_tokens - before.num_generated_tokens) / seconds,
            evicted_blocks=(now.num_evicted_blocks - before.num_evicted_blocks) / seconds,
            hit_rate=cached / prompts if prompts else None,
        )


class SequenceMeter:
    """Measures how fast the sequences of one worker get new tokens."""

    def __init__(self) -> None:
        self._looks: _Looks[SequenceName, int] = _Looks()

    def add(self, worker: cache_pb2.WorkerDescription, now: float) -> None:
        """Add a look at `now`, in monotonic seconds."""
        counts = {sequence_name(worker, sequence): sequence.num_tokens for sequence in worker.sequences}
        self._looks.add(counts, now)

    def generated_tokens(self, name: SequenceName) -> float | None:
        """Return the tokens per second since the oldest look that has the sequence; None: only the newest has it."""
        change = self._looks.change(name)
        if change is None:
            return None
        before, now, seconds = change
        # A sequence never forgets tokens: with fewer of them it is another one under the same name.
        return (now - before) / seconds if now >= before else None


def sequence_name(worker: cache_pb2.WorkerDescription, sequence: cache_pb2.SequenceDescription) -> SequenceName:
    """Return the sequence's unique name."""
    return worker.session, sequence.key.sequence_id, sequence.key.attempt
