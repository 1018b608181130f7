"""The scheduler over a cache side and a manager made of a few counters. Whatever it decides is held against its laws."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from kvpool.v1 import common_pb2
from kvpool.worker_service.cache import boundaries
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.request import GenerationParams, Request
from kvpool.worker_service.engine.scheduler import Scheduled, Scheduler
from kvpool.worker_service.engine.step import SampledToken


def token_at(sequence_id: str, position: int) -> int:
    """The one right token: it tells whose it is, and where it stands."""
    return int(sequence_id) * 100_000 + position


class FakeCache:
    """What the scheduler sees of EngineCache. A block is a number; what is freed comes back with `settle`, as by an answered
    Free."""

    def __init__(self, num_blocks: int, block_size: int, state_grid: int = 0) -> None:
        self.block_size = block_size
        self.settings = CacheSettings(block_size=block_size, state_grid=state_grid)
        self.blocks = list(range(1, num_blocks + 1))
        self.ending: list[CacheSequence] = []
        self.is_away = False
        """The reserve is empty, and the manager does not answer."""
        self.num_freed: Counter[str] = Counter()

    @property
    def is_exhausted(self) -> bool:
        return not (self.blocks or self.ending or self.is_away)

    def num_needed(self, sequence: CacheSequence) -> int:
        """Blocks that its table lacks for all its tokens."""
        return max(0, -(-len(sequence.tokens) // self.block_size) - sequence.num_entries)

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        assert num_slots == len(sequence.tokens)
        missing = self.num_needed(sequence)
        if missing and (self.is_away or missing > len(self.blocks)):
            return False
        self.take(sequence, missing)
        return True

    def chunk(self, sequence: CacheSequence, most: int) -> int:
        return boundaries.chunk(sequence, most, self.settings)

    def take(self, sequence: CacheSequence, count: int) -> None:
        """Bind so many blocks to the sequence."""
        if not sequence.tables:
            sequence.tables = ([],)
        sequence.tables[0].extend(self.blocks.pop() for _ in range(count))
        sequence.num_entries += count

    def free(self, sequence: CacheSequence) -> None:
        self.num_freed[sequence.id.sequence_id] += 1
        assert sequence.state not in (SequenceState.ENDING, SequenceState.ENDED), "freed twice"
        sequence.state = SequenceState.ENDING
        self.ending.append(sequence)

    def preempt(self, sequence: CacheSequence) -> CacheSequence:
        assert sequence.state is SequenceState.LIVE
        again = sequence.next_round()
        self.free(sequence)
        return again

    def settle(self) -> None:
        """What is done with comes back, unless a running step names it."""
        for sequence in [sequence for sequence in self.ending if not sequence.in_step]:
            self.ending.remove(sequence)
            for table in sequence.tables:
                self.blocks += table
            sequence.tables = ()
            sequence.num_entries = 0
            sequence.state = SequenceState.ENDED


class SchedulerWorld:
    """Requests, a scheduler, and the laws. `talk` is an Allocate and its answer; `step` one forward pass."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_mixed_prefill_tokens: int = 8,
        policy: SchedulingPolicy = SchedulingPolicy.fcfs,
        state_grid: int = 0,
    ) -> None:
        self.cache = FakeCache(num_blocks, block_size, state_grid)
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            cast(EngineCache, self.cache),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            policy=policy,
        )
        self.requests: list[Request] = []
        """All that were ever submitted."""
        self.open: set[str] = set()
        """sequence_ids of those that have not ended."""
        self.finished: set[str] = set()
        self.computed: Counter[str] = Counter()
        """Tokens that steps have computed, by tenant."""
        self.num_computed = 0
        self.batch: list[Scheduled] = []
        """The running step."""
        self._granted: list[CacheSequence] = []

    # -- what happens

    def submit(self, num_prompt: int, num_new: int, *, tenant: str = "", priority: int = 0) -> Request:
        """A new request. It must fit into the pool alone."""
        name = str(len(self.requests))
        assert -(-(num_prompt + num_new - 1) // self.cache.block_size) <= self.num_blocks
        prompt = [token_at(name, position) for position in range(num_prompt)]
        params = GenerationParams(name, 1, prompt, max_tokens=num_new, tenant=tenant, priority=priority)
        sequence = CacheSequence(name, 1, common_pb2.Root(), prompt, max_new_tokens=num_new)
        request = Request(params, sequence, num_new, frozenset(), None)
        self.requests.append(request)
        self.open.add(name)
        self.scheduler.add(request)
        return request

    def end(self, request: Request) -> None:
        """Its reader has gone, or it was refused. Nothing happens if it has ended."""
        self.open.discard(request.params.sequence_id)
        if self.scheduler.find(request.sequence.id) is request:
            self.scheduler.remove(request)

    def talk(self, *, lose_answer: bool = False, num_to_park: int = 0, num_cached_blocks: int = 0) -> None:
        """An Allocate of all candidates, and its answer: the first so many are told to wait for a prefix; of the others those that
        there are blocks for are granted, in order, up to the first that there are none for. The reserve goes first."""
        self.cache.settle()
        candidates = self.scheduler.candidates()
        self.check_candidates(candidates)
        for sequence in candidates:
            was_granted = bool(sequence.num_entries)
            needed = self.cache.num_needed(sequence)
            if needed and needed > len(self.cache.blocks) - self._spare_target():
                break
            if num_to_park and not was_granted:
                num_to_park -= 1
                sequence.state = SequenceState.PARKED
                continue
            self.cache.take(sequence, needed)
            if not was_granted:
                most = (len(sequence.tokens) - 1) // self.cache.block_size
                sequence.num_cached_tokens = min(num_cached_blocks, most) * self.cache.block_size
                sequence.num_computed_tokens = 0 if lose_answer else sequence.num_cached_tokens
            sequence.maybe_granted = True
            if not lose_answer:
                sequence.num_computed_tokens = sequence.num_cached_tokens
                sequence.state = SequenceState.LIVE
                self._granted.append(sequence)

    def _spare_target(self) -> int:
        """One block for each live sequence that may still need one."""
        live = [request.sequence for request in self.scheduler if request.sequence.state is SequenceState.LIVE]
        return sum(sequence.num_blocks_to_come(self.cache.block_size) > 0 for sequence in live)

    def wake(self) -> None:
        """The prefixes that were waited for are there."""
        for request in self.scheduler.waiting:
            if request.sequence.state is SequenceState.PARKED:
                request.sequence.state = SequenceState.WAITING

    def launch(self) -> list[Scheduled]:
        """Schedule a step, and check what was decided."""
        assert not self.batch
        for sequence in self._granted:
            self.scheduler.on_granted(sequence)
        self._granted = []
        running = list(self.scheduler._running)
        decoding = [request for request in running if request.num_uncomputed_tokens == 1]
        num_preemptions = self.scheduler.num_preemptions
        could_all_decode = not self.cache.is_away and sum(
            self.cache.num_needed(request.sequence) for request in decoding
        ) <= len(self.cache.blocks)
        self.batch = self.scheduler.schedule(now=0.0)
        preempted = [request for request in running if request not in self.scheduler._running]
        assert self.scheduler.num_preemptions == num_preemptions + len(preempted)
        self.check_batch(running, decoding, preempted, could_all_decode)
        for part in self.batch:
            part.sequence.in_step = True
            self.computed[part.request.params.tenant] += part.num_tokens
            self.num_computed += part.num_tokens
        return self.batch

    def land(self) -> None:
        """The step has completed."""
        batch, self.batch = self.batch, []
        for part in batch:
            sequence, request = part.sequence, part.request
            sequence.in_step = False
            sequence.num_computed_tokens += part.num_tokens
            if part.samples:
                token = token_at(sequence.id.sequence_id, len(sequence.tokens))
                sequence.tokens.append(token)
                if self.scheduler.find(sequence.id) is not request:
                    continue
                request.take(SampledToken(token))
                if request.deliver(SampledToken(token)):
                    self.open.remove(sequence.id.sequence_id)
                    self.finished.add(sequence.id.sequence_id)
                    self.scheduler.remove(request)

    def step(self) -> list[Scheduled]:
        """A whole step."""
        batch = self.launch()
        self.land()
        return batch

    def run_dry(self) -> None:
        """Until all requests have ended: somebody always gets on."""
        self.cache.is_away = False
        while self.open:
            before = self.num_computed, self.scheduler.num_preemptions, len(self.open)
            self.wake()
            self.talk()
            self.step()
            self.check_books()
            assert before != (self.num_computed, self.scheduler.num_preemptions, len(self.open)), "nobody gets on"
        self.cache.settle()
        assert sorted(self.cache.blocks) == list(range(1, self.num_blocks + 1)), "blocks have leaked"
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)

    # -- laws

    def check_candidates(self, candidates: list[CacheSequence]) -> None:
        """No more than there is room for; the unanswered first; then level by level, and each tenant's in order of arrival."""
        scheduler = self.scheduler
        requests = [cast(Request, scheduler.find(sequence.id)) for sequence in candidates]
        assert all(sequence.state is SequenceState.WAITING for sequence in candidates)
        unanswered = [sequence.maybe_granted for sequence in candidates]
        assert unanswered == sorted(unanswered, reverse=True)
        placed = scheduler.num_running + sum(
            request.sequence.state in (SequenceState.LIVE, SequenceState.ALLOCATING) for request in scheduler.waiting
        )
        assert len(candidates) <= max(scheduler.max_num_seqs - placed, sum(unanswered))
        others = requests[sum(unanswered) :]
        levels = [request.rank.level for request in others]
        assert levels == sorted(levels), "a worse level goes before a better one"
        ready = [
            request
            for request in scheduler.waiting
            if request.sequence.state is SequenceState.WAITING and not request.sequence.maybe_granted
        ]
        if len(others) < len(ready):
            assert placed + len(candidates) == scheduler.max_num_seqs, "a place is left empty"
        for payer in {(request.rank.level, request.params.tenant) for request in ready}:
            mine = [request for request in others if (request.rank.level, request.params.tenant) == payer]
            of_all = [request for request in ready if (request.rank.level, request.params.tenant) == payer]
            assert mine == of_all[: len(mine)], "a younger request of the same tenant goes first"
        passed_over = [request.rank.level for request in ready if request not in others]
        assert not (levels and passed_over) or levels[-1] <= min(passed_over), "a better level is passed over"

    def check_batch(
        self, running: list[Request], decoding: list[Request], preempted: list[Request], could_all_decode: bool
    ) -> None:
        scheduler, batch = self.scheduler, self.batch
        assert len(running) <= scheduler.max_num_seqs
        # The budget.
        assert sum(part.num_tokens for part in batch) <= scheduler.max_num_batched_tokens
        assert len({id(part.sequence) for part in batch}) == len(batch)
        # Nothing without its blocks.
        used: list[int] = []
        for part in batch:
            sequence = part.sequence
            assert part.request.sequence is sequence
            assert part.request in scheduler._running
            assert sequence.state is SequenceState.LIVE
            end = sequence.num_computed_tokens + part.num_tokens
            assert 1 <= part.num_tokens <= len(sequence.tokens) - sequence.num_computed_tokens
            assert sequence.num_entries * self.cache.block_size >= end, "a slot without a block"
            assert part.samples == (end == len(sequence.tokens))
            used += sequence.tables[0]
        assert len(used) == len(set(used)), "a block in two tables"
        # The pace of those that decode.
        scheduled = {id(part.request): part.num_tokens for part in batch}
        left = [request for request in decoding if request not in preempted]
        if could_all_decode:
            assert not preempted
            assert all(id(request) in scheduled for request in decoding), "a sequence that could decode is left out"
        prefilling = [request for request in running if request not in preempted and request not in decoding]
        num_prefilled = sum(scheduled.get(id(request), 0) for request in prefilling)
        num_decoded = len(batch) - sum(id(request) in scheduled for request in prefilling)
        room = scheduler.max_num_batched_tokens - num_decoded
        if left:
            room = min(room, scheduler.max_mixed_prefill_tokens)
        assert num_prefilled <= room, "too much is prefilled beside a decode"
        # No room is left while something could be computed, and a worse level has it only if a better one needs no more.
        wanted = {id(request): request.num_uncomputed_tokens for request in prefilling}
        assert num_prefilled == min(room, sum(wanted.values()))
        worst = max((r.rank.level for r in prefilling if id(r) in scheduled), default=0)
        for request in prefilling:
            if request.rank.level < worst:
                assert scheduled.get(id(request), 0) == wanted[id(request)], "a worse level is computed first"
        # Blocks are given back only if there are none and none are on their way; by the last in rank.
        assert not preempted or not (self.cache.blocks or self.cache.is_away)
        assert len(preempted) <= 1
        remaining = [request.rank for request in running if request not in preempted]
        assert all(request.rank > max(remaining) for request in preempted)
        assert all(request in scheduler.waiting for request in preempted)

    def check_books(self) -> None:
        """No request is lost or doubled, nor any of its tokens, nor any block."""
        scheduler = self.scheduler
        known = [request.params.sequence_id for request in scheduler]
        assert set(known) == self.open
        queued = [*scheduler.waiting, *scheduler._running]
        assert Counter(request.params.sequence_id for request in queued) == Counter(known)
        for queue in (scheduler.waiting, scheduler._running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(set(ranks))
            assert queue.num_prompt_tokens == sum(request.num_prompt_tokens for request in queue)
        for arrival, request in enumerate(self.requests, 1):
            assert request.rank.arrival == arrival, "a request has lost its place"
            name, tokens = request.params.sequence_id, request.sequence.tokens
            assert tokens == [token_at(name, position) for position in range(len(tokens))]
            if name in self.open:
                assert request.num_generated == len(tokens) - request.num_prompt_tokens
        holders: list[Any] = [request.sequence for request in queued] + self.cache.ending
        held = [
            block
            for sequence in {id(s): s for s in holders}.values()
            for block in (sequence.tables[0] if sequence.tables else ())
        ]
        assert sorted(held + self.cache.blocks) == list(range(1, self.num_blocks + 1))
