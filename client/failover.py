"""Decides whether another worker may be asked, which one is next, and when to give up. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from copy import copy
from typing import Final, NamedTuple

from kvpool.v1 import cache_pb2

from .errors import FailedPrecondition, InvalidRequest, KvpoolError, ResourceExhausted, Unavailable

_EXHAUSTED: Final = "NO_WORKER_ANSWERED"
# Refusals that hold for one worker only: it has fewer blocks than the one that began, or another model by now.
_REASONS_OF_ONE_WORKER: Final = ("NEVER_FITS", "TOO_LARGE")

_OTHER_MODEL: Final = "OTHER_MODEL"
"""The worker has restarted with another model since the request was routed. If no worker has the old model, the request is
tokenised for the model that its name means now."""

_SLOW_READER: Final = "SLOW_READER"
"""The worker ended the stream because it was not read. Another worker's answer would not be read either."""


def another_may_begin(error: KvpoolError) -> bool:
    """Whether a request that has no token yet may be answered by another worker."""
    if error.reason == _SLOW_READER:
        return False
    if error.reason == _OTHER_MODEL:
        return True
    # RESOURCE_EXHAUSTED without a reason is gRPC's own, about the size of a message: the same everywhere.
    return isinstance(error, Unavailable) or (isinstance(error, ResourceExhausted) and error.reason != "")


def another_may_go_on(error: KvpoolError) -> bool:
    """Whether another worker may continue the answer. One worker has accepted the request, so a permanent refusal by the next one
    holds for that worker only."""
    return another_may_begin(error) or (
        isinstance(error, InvalidRequest | FailedPrecondition) and error.reason in _REASONS_OF_ONE_WORKER
    )


class Target(NamedTuple):
    """The worker of one attempt at a request."""

    worker_id: str
    address: str
    attempt: int
    """1, 2, 3, …: a larger attempt fences the smaller ones everywhere."""


class _Failure(NamedTuple):
    target: Target
    error: KvpoolError


class Failover:
    """The order in which one request tries workers: first as the manager ranks them, then as it ranks them again. No I/O.

    Workers that have failed come last. Before the first token the workers are ranked twice. An answer that has begun is worth more
    patience: then they are ranked as long as attempts are left.
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
        """Return a copy for an answer that continues by itself: it has the same failures and as many attempts left."""
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
        """Return the next attempt. If none is left, raises ResourceExhausted if every worker was only full, else Unavailable."""
        if not self._ranked or self._num_attempts >= self._max_attempts:
            raise self._exhausted()
        worker = self._ranked.popleft()
        self._num_attempts += 1
        return Target(worker_id=worker.worker_id, address=worker.address, attempt=self._num_attempts)

    def failed(self, target: Target, error: KvpoolError) -> None:
        """Note the error that a worker answered with."""
        self._failures.append(_Failure(target, error))

    def broke_off(self, target: Target, error: KvpoolError) -> None:
        """Note the error of an attempt that had delivered tokens. The search starts over, since the manager can route by more."""
        self.failed(target, error)
        self._has_begun = True
        self._ranked.clear()
        self._num_rankings = 0

    def gave_up(self, error: KvpoolError, num_delivered: int) -> KvpoolError:
        """Return the reader's error when `error` ended the search for a worker that continues after `num_delivered` tokens."""
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
