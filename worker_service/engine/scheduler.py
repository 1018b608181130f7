"""Which sequences run in the next step, and how many of their tokens: continuous batching with chunked prefill.

Pure: reads requests and the cache side, calls no model, never waits. One step mixes decodes and prefill chunks under one token
budget; tokens that the cache served are not charged. Every decoding sequence is in every step, and the prefill next to it is
bounded, so that a flood of long prompts slows decodes by a bounded amount (Sarathi-Serve, OSDI 2024).

The order of requests is decided in `policy.py` (levels) and `fairness.py` (tenants).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..cache.engine_cache import EngineCache
from ..cache.sequence import CacheSequence, SequenceId, SequenceState
from ..step import SequencePart, Step
from .beams import BeamRequest
from .fairness import Fairness, tokens_by_payer
from .live_streams import LiveStreams
from .request import AnswerFork, Payer, Rank, Request
from .settings import EngineSettings


class RequestQueue:
    """Requests in order of rank."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_prompt_tokens = 0
        self.payers: Counter[Payer] = Counter()
        """Number of requests of each."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = self._index(request)
        return index < len(self._requests) and self._requests[index] is request

    @property
    def last(self) -> Request:
        """The youngest request of the worst level. The queue must not be empty."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        """Insert a request at its rank, which must be free."""
        index = self._index(request)
        assert index == len(self._requests) or self._requests[index].rank > request.rank
        self._requests.insert(index, request)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.payers[request.payer] += 1

    def remove(self, request: Request) -> None:
        """Remove a request, which must be in the queue."""
        index = self._index(request)
        assert self._requests[index] is request
        del self._requests[index]
        self.num_prompt_tokens -= request.num_prompt_tokens
        self.payers[request.payer] -= 1
        if not self.payers[request.payer]:
            del self.payers[request.payer]

    def _index(self, request: Request) -> int:
        return bisect_left(self._requests, request.rank, key=lambda other: other.rank)


class Scheduled(NamedTuple):
    """A request's part in a step: compute `num_tokens` more tokens and, if that reaches the end, sample the next."""

    request: Request
    sequence: CacheSequence
    num_tokens: int
    samples: bool
    num_encoder_tokens: int = 0
    """Tokens of the encoder's input, if the encoder runs before the part; 0: it does not."""

    @property
    def num_forwarded_tokens(self) -> int:
        """Tokens that the step computes for it."""
        return self.num_tokens + self.num_encoder_tokens

    def part(self) -> SequencePart:
        assert self.sequence in self.request.sequences
        return self.request.part(self.sequence, self.num_tokens, samples=self.samples)


def as_step(batch: list[Scheduled], copies: Sequence[AnswerFork] = ()) -> Step:
    """The batch as input of the model side."""
    return Step([scheduled.part() for scheduled in batch], [copy for fork in copies for copy in fork.copies])


class Scheduler:
    """The queue and the running batch."""

    def __init__(self, cache: EngineCache, settings: EngineSettings) -> None:
        self.max_num_seqs = settings.max_num_seqs
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.max_mixed_prefill_tokens = settings.max_mixed_prefill_tokens
        assert self.max_num_batched_tokens >= self.max_num_seqs, "decodes alone could use up the budget"
        assert self.max_mixed_prefill_tokens >= 1, "no prompt would be computed while a sequence decodes"
        limits = cache.settings
        self.max_chunk_tokens = limits.max_chunk_tokens if limits.bounds_chunks else self.max_num_batched_tokens
        """Tokens of one sequence in one step: its rings have room for no more."""
        self.policy = settings.scheduling_policy
        self.num_preemptions = 0
        self._cache = cache
        self.waiting = RequestQueue()
        """Requests that have no block table yet, or were preempted. Read-only."""
        self._running = RequestQueue()
        self._fairness = Fairness()
        self._requests: dict[SequenceId, Request] = {}
        """Requests by the id of each of their sequences."""
        self.streams = LiveStreams()
        self._copies: list[AnswerFork] = []
        self._num_arrived = 0

    # -- requests

    @property
    def num_running(self) -> int:
        """Sequences that have a block table."""
        return sum(len(request.sequences) for request in self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have no block table yet, or were preempted."""
        return len(self.waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of all requests whose KV is not computed."""
        return sum(request.num_uncomputed_tokens for request in self)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(dict.fromkeys(self._requests.values())))

    def find(self, sequence_id: SequenceId) -> Request | None:
        """The request of a live (sequence_id, attempt)."""
        return self._requests.get(sequence_id)

    def add(self, request: Request) -> None:
        self._num_arrived += 1
        level = self.policy.level(request.params)
        request.rank = Rank(level, self._num_arrived)
        request.sequence.level = level
        request.payer = Payer(level, request.params.tenant)
        self.streams.add(request)
        self._requests[request.sequence.id] = request
        self._wait(request)

    def add_fork(self, fork: AnswerFork) -> None:
        """Add an answer that begins where another one is: it runs, or waits if it has no blocks."""
        request, sequence = fork.request, fork.request.sequence
        sequence.level = request.rank.level
        self.streams.add(request)
        self._requests[sequence.id] = request
        if sequence.state is SequenceState.LIVE:
            self._running.add(request)
            self._copies.append(fork)
        else:
            self._wait(request)

    def has_place_for(self, request: Request) -> bool:
        """Whether one more answer of a running request may run, in one of the places that it was admitted with."""
        others = [other for other in self._running if other.answers is not request.answers]
        num_own = len(self._running) - len(others)
        return self._num_places(others) + num_own < self.max_num_seqs

    def remove(self, request: Request) -> None:
        """Remove a request that has not ended, and free its blocks."""
        (self._running if request in self._running else self.waiting).remove(request)
        self.streams.remove(request)
        for sequence in request.sequences:
            del self._requests[sequence.id]
            self._cache.free(sequence)
        self._drop_copies(request)

    def take_copies(self) -> list[AnswerFork]:
        """What the step that is launched now copies first, for all forks since the last one."""
        copies, self._copies = self._copies, []
        return copies

    def _drop_copies(self, request: Request) -> None:
        """Drop the copies of a request whose blocks are given back: they may be another's by the next step."""
        self._copies = [fork for fork in self._copies if fork.request is not request]

    def _num_places(self, requests: Iterable[Request]) -> int:
        """Places in the batch. What does not get one there waits for its turn."""
        return sum(min(request.num_places, self.max_num_seqs) for request in requests)

    def on_granted(self, sequence: CacheSequence) -> Request | None:
        """The sequence of a waiting request has its block table; returns the request, None if it has ended."""
        request = self._requests.get(sequence.id)
        if request is None or request.sequence is not sequence:
            return None
        self.waiting.remove(request)
        self._running.add(request)
        request.on_granted()
        return request

    def candidates(self) -> list[CacheSequence]:
        """Waiting sequences that the batch has room for, in order. A request counts with all the sequences that it will have. Those
        that wait for a prefix in flight are skipped and not counted: they hold nothing. Sequences whose Allocate was not answered
        come first and keep their place in the batch: the manager may hold blocks for them that others need."""
        ready: list[Request] = []
        unanswered: list[Request] = []
        admitted: list[Request] = []
        for request in self.waiting:
            sequence = request.sequence
            if sequence.state is SequenceState.WAITING:
                (unanswered if sequence.maybe_granted else ready).append(request)
            elif sequence.state is not SequenceState.PARKED:
                # Being allocated; or live: granted during a step, it joins the next batch.
                admitted.append(request)
        sequences = [request.sequence for request in unanswered]
        placed = (*self._running, *admitted, *unanswered)
        room = self.max_num_seqs - self._num_places(placed)
        if ready and room > 0:
            # Admitted requests count as computed: else one tenant could take all places at once.
            committed = tokens_by_payer((request, request.num_uncomputed_tokens) for request in placed)
            for request in self._fairness.in_order(ready, committed):
                room -= self._num_places([request])
                if room < 0:
                    break  # not the next one: a request with many sequences would be overtaken for ever
                sequences.append(request.sequence)
        return sequences

    # -- steps

    def schedule(self, now: float) -> list[Scheduled]:
        """The next batch; empty if nothing can run now. Preempts requests, last in rank first, while the pool is exhausted. `now`,
        in monotonic seconds, decides nothing: it is noted where one is preempted."""
        assert self._num_places(self._running) <= self.max_num_seqs
        while True:
            num_preemptions = self.num_preemptions
            self._fork_beams(now)
            decodes = self._schedule_decodes(now)
            batch = decodes + self._schedule_prefills(decodes, now)
            # A request of several sequences may have been preempted after one of them was scheduled.
            batch = [scheduled for scheduled in batch if scheduled.sequence.state is SequenceState.LIVE]
            # One that was passed over may have room now: blocks of a fork that the manager does not know yet are back at once, also
            # if they are back after the next one has been preempted. No reply would wake the engine.
            if batch or self.num_preemptions == num_preemptions:
                break
        self._fairness.charge((part.request, part.num_forwarded_tokens) for part in batch)
        return batch

    def _fork_beams(self, now: float) -> None:
        """Let searches go on that have chosen their next beams. One without blocks for them waits, and all its beams with it."""
        for request in list(self._running):
            while isinstance(request, BeamRequest) and request.is_branching and request in self._running:
                before = request.sequences
                self._copies.extend(AnswerFork(request, copies) for copies in request.branch(self._cache))
                self._rename(request, before)
                if not (request.is_branching and self._cache.lacks_blocks_for_forks and self._preempt_last(now)):
                    break

    def _rename(self, request: Request, before: Sequence[CacheSequence]) -> None:
        """Note that the request has other sequences than `before`."""
        for sequence in before:
            del self._requests[sequence.id]
        for sequence in request.sequences:
            self._requests[sequence.id] = request

    def _schedule_decodes(self, now: float) -> list[Scheduled]:
        return [
            Scheduled(request, sequence, 1, True)
            for request in list(self._running)
            for sequence in request.sequences
            # One before it in this loop may have preempted it.
            if sequence.state is SequenceState.LIVE
            and sequence.num_uncomputed_tokens == 1
            and self._make_room(sequence, len(sequence.tokens), now)
        ]

    def _schedule_prefills(self, decodes: list[Scheduled], now: float) -> list[Scheduled]:
        prefilling = [request for request in self._running if _prompts(request)]
        for request in prefilling:
            # Most have entered when they were to wait; the beams of a group that is resumed have more to compute after a pause.
            self._fairness.enter(request.payer)
        self._fairness.settle({*self.waiting.payers, *(request.payer for request in prefilling)})
        if not prefilling:
            return []
        budget = self.max_num_batched_tokens - len(decodes)
        if any(len(_prompts(request)) < len(request.sequences) for request in self._running):
            # Also if no decode has a block now: it may get one during this step.
            budget = min(budget, self.max_mixed_prefill_tokens)
        prefills: list[Scheduled] = []
        committed = tokens_by_payer((part.request, 1) for part in decodes)
        for request in self._fairness.in_order(prefilling, committed):
            for sequence in _prompts(request):
                if sequence.state is not SequenceState.LIVE:
                    break  # one before it has preempted its request
                num_to_encode = sequence.num_tokens_to_encode
                if num_to_encode >= budget and prefills:
                    return prefills  # an encoder runs over all of its input in one step, if need be beyond the budget
                most = max(1, budget - num_to_encode)
                count = self._cache.chunk(sequence, min(most, self.max_chunk_tokens))
                if not count and not prefills:
                    # Chunks of a state end on a grid. Were the budget smaller than that, the prompt would wait for ever.
                    count = self._cache.chunk(sequence, self._cache.settings.grid_tokens)
                # A granted prompt has its blocks; a beam that is computed again may lack some.
                if not (count and self._make_room(sequence, sequence.num_computed_tokens + count, now)):
                    continue
                is_last = sequence.num_computed_tokens + count == len(sequence.tokens)
                prefills.append(Scheduled(request, sequence, count, is_last, num_to_encode))
                budget -= count + num_to_encode
                if budget <= 0:
                    return prefills
        return prefills

    def _make_room(self, sequence: CacheSequence, num_slots: int, now: float) -> bool:
        """Get slots for the tokens to be computed. If the pool is exhausted, preempt the last in rank."""
        if self._cache.extend(sequence, num_slots):
            return True
        if not self._cache.is_exhausted or not self._preempt_last(now):
            return False
        # Blocks of a fork that the manager does not know yet are back at once, and no reply will say so.
        return sequence.state is SequenceState.LIVE and self._cache.extend(sequence, num_slots)

    def _preempt_last(self, now: float) -> bool:
        """Preempt the last in rank of several that run. A request that runs alone gets the blocks that are on their way, unless
        ended sequences keep them for their forks. Returns whether one was preempted."""
        if len(self._running) < 2 and not (self._running and self._cache.forks_hold_blocks):
            return False
        self._preempt(self._running.last, now)
        return True

    def _preempt(self, request: Request, now: float) -> None:
        """Return a request with all its sequences to its place in the queue; its KV is computed again."""
        self._running.remove(request)
        request.times.on_preempted(request.sequence.num_computed_tokens, now)
        before = request.sequences
        request.preempt(self._cache)
        self._drop_copies(request)
        self._rename(request, before)
        self.num_preemptions += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        self.waiting.add(request)
        self._fairness.enter(request.payer)


def _prompts(request: Request) -> list[CacheSequence]:
    """The request's sequences whose prompts are not computed, or must be computed again."""
    return [sequence for sequence in request.sequences if sequence.num_uncomputed_tokens > 1]
