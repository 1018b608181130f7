"""Whom to ask, in which order, and when to give up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvpool.v1 import cache_pb2

from .errors import KvpoolError, ResourceExhausted, Unavailable


class Target(NamedTuple):
    """One try at one request."""

    worker_id: str
    address: str
    attempt: int
    """1, 2, 3, …: a larger attempt fences the smaller ones anywhere."""


class _Failure(NamedTuple):
    target: Target
    error: KvpoolError


class Attempts:
    """The order of workers for one request: as the manager ranked them, ranked anew once, then an end. No I/O."""

    MAX_RANKINGS: Final = 2

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._ranked: deque[cache_pb2.RoutedWorker] = deque()
        self._num_rankings = 0
        self._num_attempts = 0
        self._failures: list[_Failure] = []

    def __repr__(self) -> str:
        return f"Attempts(made={self._num_attempts}, left={len(self._ranked)}, rankings={self._num_rankings})"

    @property
    def wants_ranking(self) -> bool:
        """Whether next() needs a new rank() first."""
        return not self._ranked and self._num_rankings < self.MAX_RANKINGS and self._num_attempts < self._max_attempts

    @property
    def has_failed(self) -> bool:
        """Whether anybody was asked in vain."""
        return bool(self._failures)

    def rank(self, workers: Iterable[cache_pb2.RoutedWorker]) -> None:
        """Take the manager's ranking, best first."""
        self._ranked = deque(workers)
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

    def _exhausted(self) -> KvpoolError:
        said = "; ".join(str(failure.error) for failure in self._failures)
        message = (
            f"no worker took the request in {self._num_attempts} attempts: {said}; "
            "`kvpool status` shows who is there, the workers' logs say why"
        )
        errors = [failure.error for failure in self._failures]
        hints = [error.retry_after for error in errors if error.retry_after is not None]
        retry_after = min(hints, default=None)
        if errors and all(isinstance(error, ResourceExhausted) for error in errors):
            return ResourceExhausted(message, reason=errors[-1].reason, retry_after=retry_after)
        return Unavailable(message, reason="NO_WORKER_ANSWERED", retry_after=retry_after)
