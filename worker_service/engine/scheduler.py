"""Which sequences run in the next step, and how many of their tokens: continuous batching with chunked prefill.

Pure: looks at requests and at the cache side, calls no model, waits for nothing. One step mixes decodes and prefill chunks under
one token budget; tokens that the cache served are not charged. Every sequence that decodes is in every step, and what is
prefilled beside it is bounded, so that a flood of long prompts slows it down by a bounded amount (Sarathi-Serve, OSDI 2024).

Who comes first is decided in `queue.py` (policy, preemption) and `fairness.py` (tenants).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence, SequenceId, SequenceState
from .fairness import Fairness, tokens_by_payer
from .policy import SchedulingPolicy
from .queue import RequestQueue
from .request import Payer, Rank, Request
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
    """The queue and the running batch."""

    def __init__(
        self,
        cache: EngineCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_mixed_prefill_tokens: int = 512,
        policy: SchedulingPolicy = SchedulingPolicy.fcfs,
    ) -> None:
        """`max_mixed_prefill_tokens`: prefilled in one step at most while a sequence decodes."""
        assert max_num_batched_tokens >= max_num_seqs, "decodes alone could use up the budget"
        assert max_mixed_prefill_tokens >= 1, "nobody's prompt would be computed beside a decode"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.policy = policy
        self.num_preemptions = 0
        self._cache = cache
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._fairness = Fairness()
        self._requests: dict[SequenceId, Request] = {}
        self._num_arrived = 0

    # -- requests

    @property
    def num_running(self) -> int:
        """Requests that have a block table."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none yet, or had to give it back."""
        return len(self._waiting)

    @property
    def waiting(self) -> RequestQueue:
        """Those, in the order of their ranks; for reading."""
        return self._waiting

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens of all requests that are still to be computed."""
        return sum(request.num_uncomputed_tokens for request in self)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def find(self, sequence_id: SequenceId) -> Request | None:
        """The request of a live (sequence_id, attempt)."""
        return self._requests.get(sequence_id)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._num_arrived += 1
        level = self.policy.level(request.params)
        request.rank = Rank(level, self._num_arrived)
        request.sequence.level = level
        request.payer = Payer(level, request.params.tenant)
        self._requests[request.sequence.id] = request
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if self._requests.get(request.sequence.id) is not request:
            return  # it has ended, and its name may have been taken by another one since
        del self._requests[request.sequence.id]
        (self._running if request in self._running else self._waiting).remove(request)
        self._cache.free(request.sequence)

    def on_granted(self, sequence: CacheSequence) -> None:
        """The sequence of a waiting request has its block table."""
        request = self._requests.get(sequence.id)
        if request is None or request.sequence is not sequence:
            return
        self._waiting.remove(request)
        self._running.add(request)
        request.on_granted()

    def candidates(self) -> list[CacheSequence]:
        """Waiting sequences that there is room for in the batch, in order. Those waiting for a prefix in flight are passed over,
        not counted: they hold nothing. Those whose Allocate was not answered come first and keep their place in the batch: the
        manager may hold blocks for them that everybody else is short of."""
        ready: list[Request] = []
        unanswered: list[Request] = []
        admitted: list[Request] = []
        for request in self._waiting:
            sequence = request.sequence
            if sequence.state is SequenceState.WAITING:
                (unanswered if sequence.maybe_granted else ready).append(request)
            elif sequence.state is not SequenceState.PARKED:
                # Being allocated; or live: granted while a step runs, it joins the batch when that has completed.
                admitted.append(request)
        sequences = [request.sequence for request in unanswered]
        room = self.max_num_seqs - len(self._running) - len(admitted) - len(unanswered)
        if ready and room > 0:
            # What has a place and is still to be computed counts as if it had been: else one tenant could take all places at once.
            placed = (*self._running, *admitted, *unanswered)
            committed = tokens_by_payer((request, request.num_uncomputed_tokens) for request in placed)
            chosen = islice(self._fairness.in_order(ready, committed), room)
            sequences += [request.sequence for request in chosen]
        return sequences

    # -- steps

    def schedule(self) -> list[Scheduled]:
        """The next batch; empty if nothing can run now. Preempts the last in rank while the pool is exhausted."""
        assert len(self._running) <= self.max_num_seqs
        decodes = self._schedule_decodes()
        batch = decodes + self._schedule_prefills(decodes)
        self._fairness.charge((part.request, part.num_tokens) for part in batch)
        return batch

    def _schedule_decodes(self) -> list[Scheduled]:
        return [
            Scheduled(request, request.sequence, 1, True)
            for request in list(self._running)
            # Unless one before it has preempted it.
            if request.sequence.state is SequenceState.LIVE
            and request.num_uncomputed_tokens == 1
            and self._make_room(request)
        ]

    def _schedule_prefills(self, decodes: list[Scheduled]) -> list[Scheduled]:
        prefilling = [request for request in self._running if request.num_uncomputed_tokens > 1]
        self._fairness.settle({*self._waiting.payers, *(request.payer for request in prefilling)})
        if not prefilling:
            return []
        budget = self.max_num_batched_tokens - len(decodes)
        if len(prefilling) < len(self._running):
            # Also when none of those that decode has a block just now: it may have one while this step runs.
            budget = min(budget, self.max_mixed_prefill_tokens)
        prefills: list[Scheduled] = []
        committed = tokens_by_payer((part.request, 1) for part in decodes)
        for request in self._fairness.in_order(prefilling, committed):
            remaining = request.num_uncomputed_tokens
            count = min(remaining, budget)
            prefills.append(Scheduled(request, request.sequence, count, count == remaining))
            budget -= count
            if not budget:
                break
        return prefills

    def _make_room(self, request: Request) -> bool:
        """A slot for the token to be computed. While the pool is exhausted, the last in rank gives its blocks back."""
        sequence = request.sequence
        if self._cache.extend(sequence, len(sequence.tokens)):
            return True
        if self._cache.is_exhausted and len(self._running) > 1:
            self._preempt(self._running.last)
        return False

    def _preempt(self, request: Request) -> None:
        """Back to its place in the queue, to be computed again in the next round."""
        self._running.remove(request)
        request.sequence = self._cache.preempt(request.sequence)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self._waiting.add(request)
        self._fairness.enter(request.payer)
