"""Whom to ask, in which order, and when to give up."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from copy import copy
from typing import Final, NamedTuple

from kvpool.v1 import cache_pb2

from .errors import KvpoolError, ResourceExhausted, Unavailable

_EXHAUSTED: Final = "NO_WORKER_ANSWERED"


class Target(NamedTuple):
    """One try at one request."""

    worker_id: str
    address: str
    attempt: int
    """1, 2, 3, …: a larger attempt fences the smaller ones anywhere."""


class _Failure(NamedTuple):
    target: Target
    error: KvpoolError


class Failover:
    """The order of workers for one request: as the manager ranked them, ranked again, then an end. No I/O.

    Workers that have failed come last. Before the first token the workers are ranked twice; an answer that has begun is worth more
    patience, so then they are ranked as long as there are attempts.
    """

    MAX_RANKINGS: Final = 2

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._ranked: deque[cache_pb2.RoutedWorker] = deque()
        self._num_rankings = 0
        self._num_attempts = 0
        self._has_begun = False
        self._failures: list[_Failure] = []

    def __repr__(self) -> str:
        return f"Failover(made={self._num_attempts}, left={len(self._ranked)}, rankings={self._num_rankings})"

    def fork(self) -> Failover:
        """That of an answer that goes on by itself from here: the same failures, and as many attempts left."""
        again = copy(self)
        again._ranked, again._failures = deque(self._ranked), list(self._failures)
        return again

    @property
    def wants_ranking(self) -> bool:
        """Whether next() needs a new rank() first."""
        if self._ranked or self._num_attempts >= self._max_attempts:
            return False
        return self._has_begun or self._num_rankings < self.MAX_RANKINGS

    @property
    def wants_pause(self) -> bool:
        """Whether all workers of the last ranking have failed: the next one should not follow at once."""
        return self._num_rankings > 0

    def rank(self, workers: Iterable[cache_pb2.RoutedWorker]) -> None:
        """Take the manager's ranking, best first."""
        num_failures = Counter((failure.target.worker_id, failure.target.address) for failure in self._failures)
        self._ranked = deque(sorted(workers, key=lambda worker: num_failures[worker.worker_id, worker.address]))
        self._num_rankings += 1

    def next(self) -> Target:
        """The next try. When all were made: Unavailable, or ResourceExhausted if every worker only was full."""
        if not self._ranked or self._num_attempts >= self._max_attempts:
            raise self._exhausted()
        worker = self._ranked.popleft()
        self._num_attempts += 1
        return Target(worker_id=worker.worker_id, address=worker.address, attempt=self._num_attempts)

    def failed(self, target: Target, error: KvpoolError) -> None:
        """Note what a worker said instead of an answer."""
        self._failures.append(_Failure(target, error))

    def broke_off(self, target: Target, error: KvpoolError) -> None:
        """Note what ended an attempt that had delivered tokens: there is more to route by, so the search starts over."""
        self.failed(target, error)
        self._has_begun = True
        self._ranked.clear()
        self._num_rankings = 0

    def gave_up(self, error: KvpoolError, num_delivered: int) -> KvpoolError:
        """The reader's error: `error` ended the search for a worker that continues after `num_delivered` tokens."""
        message = (
            f"the answer broke off after {num_delivered} tokens, which were delivered, and could not go on: {error}"
        )
        if error.reason != _EXHAUSTED:
            message += f"; before that, {self._said()}"
        message += "; what came is good: ask again, with the prompt and these tokens or from the start"
        return type(error)(
            message,
            reason=error.reason,
            retry_after=error.retry_after,
            metadata={**error.metadata, "num_delivered_tokens": str(num_delivered)},
            violations=error.violations,
        )

    def _said(self) -> str:
        return "; ".join(str(failure.error) for failure in self._failures)

    def _exhausted(self) -> KvpoolError:
        message = (
            f"no worker took the request in {self._num_attempts} attempts: {self._said()}; "
            "`kvpool status` shows who is there, the workers' logs say why"
        )
        errors = [failure.error for failure in self._failures]
        hints = [error.retry_after for error in errors if error.retry_after is not None]
        retry_after = min(hints, default=None)
        if errors and all(isinstance(error, ResourceExhausted) for error in errors):
            return ResourceExhausted(message, reason=errors[-1].reason, retry_after=retry_after)
        return Unavailable(message, reason=_EXHAUSTED, retry_after=retry_after)
