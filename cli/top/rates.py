"""Rates out of what the manager's Describe counts: differences between looks, over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from kvpool.v1 import cache_pb2

WINDOW_SECONDS: Final = 5.0
"""A worker states its tokens block by block, so what a second brings is all or nothing."""

SequenceName = tuple[int, str, int]
"""Session, sequence_id and attempt. The round is left out: a sequence that is granted again keeps its tokens."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one worker."""

    prompt_tokens: float
    """Per second, as the others; with those that the cache served."""
    generated_tokens: float
    evicted_blocks: float
    hit_rate: float | None
    """Share of the prompt tokens that the cache served; None where no prompt came in."""


_Name = TypeVar("_Name", bound=Hashable)
_Counts = TypeVar("_Counts")


class _Change(NamedTuple, Generic[_Counts]):
    """What was counted at first and at last, and the time between."""

    before: _Counts
    now: _Counts
    seconds: float


class _Looks(Generic[_Name, _Counts]):
    """Some looks at things that come and go, the newest to be compared with the oldest."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[_Name, _Counts]]] = deque()

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, counts: dict[_Name, _Counts], now: float) -> None:
        looks = self._looks
        looks.append((now, counts))
        # One that is older than the window stays while it is all there is to compare with.
        while len(looks) > 2 and looks[1][0] <= now - WINDOW_SECONDS:
            looks.popleft()

    def change(self, name: _Name) -> _Change[_Counts] | None:
        """Since the oldest look that knows the name; None if only the newest does, or not even that."""
        if not self._looks:
            return None
        newest_at, newest = self._looks[-1]
        if name not in newest:
            return None
        oldest_at, oldest = next(look for look in self._looks if name in look[1])
        seconds = newest_at - oldest_at
        return _Change(oldest[name], newest[name], seconds) if seconds > 0 else None


class RateMeter:
    """Remembers some looks at the workers and compares the newest with the oldest."""

    def __init__(self) -> None:
        self._looks: _Looks[int, cache_pb2.WorkerTotals] = _Looks()

    def add(self, response: cache_pb2.DescribeResponse, now: float) -> None:
        """A look at `now`, in seconds of a clock that only goes forward."""
        # By session: each begins at zero.
        self._looks.add({worker.session: worker.totals for worker in response.workers}, now)

    def rates(self, session: int) -> Rates | None:
        """Since the oldest look that knows the session; None if only the newest does."""
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
    """The same for the sequences of one worker: how fast their known tokens become more."""

    def __init__(self) -> None:
        self._looks: _Looks[SequenceName, int] = _Looks()

    def add(self, worker: cache_pb2.WorkerDescription, now: float) -> None:
        """A look at `now`, in seconds of a clock that only goes forward."""
        known = {sequence_name(worker, sequence): sequence.num_tokens for sequence in worker.sequences}
        self._looks.add(known, now)

    def generated_tokens(self, name: SequenceName) -> float | None:
        """Per second, since the oldest look that knows the sequence; None if only the newest does."""
        change = self._looks.change(name)
        # A sequence never forgets tokens: with fewer of them it is another one under the same name.
        if change is None or change.now < change.before:
            return None
        return (change.now - change.before) / change.seconds


def sequence_name(worker: cache_pb2.WorkerDescription, sequence: cache_pb2.SequenceDescription) -> SequenceName:
    """The sequence's unique name."""
    return worker.session, sequence.key.sequence_id, sequence.key.attempt
