"""Which sequences run in the next step, and how many of their tokens: continuous batching with chunked prefill.

Pure: looks at requests and at the cache side, calls no model, waits for nothing. One step mixes decodes and prefill chunks under
one token budget; tokens that the cache served are not charged. Decodes come first, so that a long prompt never stops the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence, SequenceId, SequenceState
from .request import Request
from .step import SequencePart, Step


class Scheduled(NamedTuple):
    """A request's part in a step: compute `num_tokens` more tokens and, if that reaches the end, sample the next."""

    request: Request
    sequence: CacheSequence
    num_tokens: int
    samples: bool

    def part(self) -> SequencePart:
        """The part as the model side sees it."""
        assert self.sequence is self.request.sequence
        return self.request.part(self.num_tokens, samples=self.samples)


def as_step(batch: list[Scheduled]) -> Step:
    """The batch as the model side sees it."""
    return Step([scheduled.part() for scheduled in batch])


class Scheduler:
    """The queue and the running batch, first come first served."""

    def __init__(self, cache: EngineCache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "decodes alone could use up the budget"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._cache = cache
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        """In the order of admission: the last is the youngest."""
        self._requests: dict[SequenceId, Request] = {}

    # -- requests

    @property
    def num_running(self) -> int:
        """Requests that have a block table."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet."""
        return len(self._waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens of all requests that are still to be computed."""
        return sum(len(request.sequence.tokens) - request.sequence.num_computed_tokens for request in self)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def find(self, sequence_id: SequenceId) -> Request | None:
        """The request of a live (sequence_id, attempt)."""
        return self._requests.get(sequence_id)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._requests[request.sequence.id] = request
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if self._requests.get(request.sequence.id) is not request:
            return  # it has ended, and its name may have been taken by another one since
        del self._requests[request.sequence.id]
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._cache.free(request.sequence)

    def on_granted(self, sequence: CacheSequence) -> None:
        """The sequence of a waiting request has its block table."""
        request = self._requests.get(sequence.id)
        if request is None or request.sequence is not sequence:
            return
        self._waiting.remove(request)
        self._running.append(request)
        request.on_granted()

    def candidates(self) -> list[CacheSequence]:
        """Waiting sequences that there is room for in the batch, in order. Those waiting for a prefix in flight are passed over,
        not counted: they hold nothing. Those whose Allocate was not answered come first and keep their place in the batch: the
        manager may hold blocks for them that everybody else is short of."""
        waiting = [request.sequence for request in self._waiting]
        unanswered = [seq for seq in waiting if seq.state is SequenceState.WAITING and seq.maybe_granted]
        others = [seq for seq in waiting if seq.state is SequenceState.WAITING and not seq.maybe_granted]
        # Live ones were granted while a step runs; they join the batch when it has completed.
        num_admitted = sum(seq.state in (SequenceState.ALLOCATING, SequenceState.LIVE) for seq in waiting)
        room = self.max_num_seqs - len(self._running) - num_admitted - len(unanswered)
        return unanswered + others[: max(0, room)]

    # -- steps

    def schedule(self) -> list[Scheduled]:
        """The next batch; empty if nothing can run now. Preempts the youngest while the pool is exhausted."""
        assert len(self._running) <= self.max_num_seqs
        budget = self.max_num_batched_tokens
        decodes: list[Scheduled] = []
        for request in list(self._running):
            if request not in self._running:  # preempted by an older one
                continue
            sequence = request.sequence
            if len(sequence.tokens) - sequence.num_computed_tokens == 1 and self._make_room(request):
                decodes.append(Scheduled(request, sequence, 1, True))
        budget -= len(decodes)
        prefills: list[Scheduled] = []
        for request in self._running:
            sequence = request.sequence
            remaining = len(sequence.tokens) - sequence.num_computed_tokens
            if remaining > 1 and budget:
                count = min(remaining, budget)
                prefills.append(Scheduled(request, sequence, count, count == remaining))
                budget -= count
        return decodes + prefills

    def _make_room(self, request: Request) -> bool:
        """A slot for the token to be computed. While the pool is exhausted, the youngest gives its blocks back."""
        sequence = request.sequence
        if self._cache.extend(sequence, len(sequence.tokens)):
            return True
        if self._cache.is_exhausted and len(self._running) > 1:
            self._preempt(self._running[-1])
        return False

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, to be computed again in the next round."""
        self._running.remove(request)
        request.sequence = self._cache.preempt(request.sequence)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(request)
