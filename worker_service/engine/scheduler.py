"""Which sequences run in the next step, and how many of their tokens: continuous batching with chunked prefill.

Pure: reads requests and the cache side, calls no model, never waits. One step mixes decodes and prefill chunks under one token
budget; tokens that the cache served are not charged. Every decoding sequence is in every step, and the prefill next to it is
bounded, so that a flood of long prompts slows decodes by a bounded amount (Sarathi-Serve, OSDI 2024).

The order of requests is decided in `policy.py` (levels) and `fairness.py` (tenants).
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
        assert self.sequence is self.request.sequence
        return self.request.part(self.num_tokens, samples=self.samples)


def as_step(batch: list[Scheduled]) -> Step:
    """The batch as input of the model side."""
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
        max_chunk_tokens: int | None = None,
        policy: SchedulingPolicy = SchedulingPolicy.fcfs,
    ) -> None:
        """`max_mixed_prefill_tokens`: prompt tokens in one step while a sequence decodes. `max_chunk_tokens`: of one sequence; its
        rings have room for no more."""
        assert max_num_batched_tokens >= max_num_seqs, "decodes alone could use up the budget"
        assert max_mixed_prefill_tokens >= 1, "no prompt would be computed while a sequence decodes"
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_prefill_tokens = max_mixed_prefill_tokens
        self.max_chunk_tokens = max_num_batched_tokens if max_chunk_tokens is None else max_chunk_tokens
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
        """Requests that have none yet, or were preempted."""
        return len(self._waiting)

    @property
    def waiting(self) -> RequestQueue:
        """The waiting requests, read-only."""
        return self._waiting

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of all requests whose KV is not computed."""
        return sum(request.num_uncomputed_tokens for request in self)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def find(self, sequence_id: SequenceId) -> Request | None:
        """The request of a live (sequence_id, attempt)."""
        return self._requests.get(sequence_id)

    def add(self, request: Request) -> None:
        self._num_arrived += 1
        level = self.policy.level(request.params)
        request.rank = Rank(level, self._num_arrived)
        request.sequence.level = level
        request.payer = Payer(level, request.params.tenant)
        self._requests[request.sequence.id] = request
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has not ended, and free its blocks."""
        del self._requests[request.sequence.id]
        (self._running if request in self._running else self._waiting).remove(request)
        self._cache.free(request.sequence)

    def on_granted(self, sequence: CacheSequence) -> Request | None:
        """The sequence of a waiting request has its block table; returns the request, None if it has ended."""
        request = self._requests.get(sequence.id)
        if request is None or request.sequence is not sequence:
            return None
        self._waiting.remove(request)
        self._running.add(request)
        request.on_granted()
        return request

    def candidates(self) -> list[CacheSequence]:
        """Waiting sequences that the batch has room for, in order. Sequences that wait for a prefix in flight are skipped and not
        counted: they hold nothing. Sequences whose Allocate was not answered come first and keep their place in the batch: the
        manager may hold blocks for them that others need."""
        ready: list[Request] = []
        unanswered: list[Request] = []
        admitted: list[Request] = []
        for request in self._waiting:
            sequence = request.sequence
            if sequence.state is SequenceState.WAITING:
                (unanswered if sequence.maybe_granted else ready).append(request)
            elif sequence.state is not SequenceState.PARKED:
                # Being allocated; or live: granted during a step, it joins the next batch.
                admitted.append(request)
        sequences = [request.sequence for request in unanswered]
        room = self.max_num_seqs - len(self._running) - len(admitted) - len(unanswered)
        if ready and room > 0:
            # Admitted requests count as computed: else one tenant could take all places at once.
            placed = (*self._running, *admitted, *unanswered)
            committed = tokens_by_payer((request, request.num_uncomputed_tokens) for request in placed)
            chosen = islice(self._fairness.in_order(ready, committed), room)
            sequences += [request.sequence for request in chosen]
        return sequences

    # -- steps

    def schedule(self, now: float) -> list[Scheduled]:
        """The next batch; empty if nothing can run now. Preempts requests, last in rank first, while the pool is exhausted. `now`,
        in monotonic seconds, decides nothing: it is noted where one is preempted."""
        assert len(self._running) <= self.max_num_seqs
        decodes = self._schedule_decodes(now)
        batch = decodes + self._schedule_prefills(decodes)
        self._fairness.charge((part.request, part.num_tokens) for part in batch)
        return batch

    def _schedule_decodes(self, now: float) -> list[Scheduled]:
        return [
            Scheduled(request, request.sequence, 1, True)
            for request in list(self._running)
            # One before it in this loop may have preempted it.
            if request.sequence.state is SequenceState.LIVE
            and request.num_uncomputed_tokens == 1
            and self._make_room(request, now)
        ]

    def _schedule_prefills(self, decodes: list[Scheduled]) -> list[Scheduled]:
        prefilling = [request for request in self._running if request.num_uncomputed_tokens > 1]
        self._fairness.settle({*self._waiting.payers, *(request.payer for request in prefilling)})
        if not prefilling:
            return []
        budget = self.max_num_batched_tokens - len(decodes)
        if len(prefilling) < len(self._running):
            # Also if no decode has a block now: it may get one during this step.
            budget = min(budget, self.max_mixed_prefill_tokens)
        prefills: list[Scheduled] = []
        committed = tokens_by_payer((part.request, 1) for part in decodes)
        for request in self._fairness.in_order(prefilling, committed):
            remaining = request.num_uncomputed_tokens
            sequence = request.sequence
            count = self._cache.chunk(sequence, min(budget, self.max_chunk_tokens))
            if not count and not prefills:
                # Chunks of a state end on a grid. Were the budget smaller than that, the prompt would wait for ever.
                count = self._cache.chunk(sequence, self._cache.settings.state_grid)
            if not count:
                continue
            if sequence.scratch and not self._cache.extend(sequence, sequence.num_computed_tokens + count):
                continue  # scratch has what a chunk needs, so this cannot be; but a step without blocks would write into others
            prefills.append(Scheduled(request, sequence, count, count == remaining))
            budget -= count
            if budget <= 0:
                break
        return prefills

    def _make_room(self, request: Request, now: float) -> bool:
        """Get a slot for the token to be computed. If the pool is exhausted, preempt the last in rank."""
        sequence = request.sequence
        if self._cache.extend(sequence, len(sequence.tokens)):
            return True
        if self._cache.is_exhausted and len(self._running) > 1:
            self._preempt(self._running.last, now)
        return False

    def _preempt(self, request: Request, now: float) -> None:
        """Return a request to its place in the queue; its KV is computed again."""
        self._running.remove(request)
        request.times.on_preempted(request.sequence.num_computed_tokens, now)
        request.sequence = self._cache.preempt(request.sequence)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self._waiting.add(request)
        self._fairness.enter(request.payer)
