"""The scheduler over a cache side and a manager made of a few counters. Whatever it decides is held against its laws. Requests have
one answer or several, or are searched by beams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

from kvpool.protocol.answers import answer_id
from kvpool.v1 import common_pb2
from kvpool.worker_service.cache import boundaries
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.entry import BlockCopy
from kvpool.worker_service.cache.forks import ForkedSequence
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.engine.beam_search import BeamParams, BeamSearch
from kvpool.worker_service.engine.beams import BeamRequest
from kvpool.worker_service.engine.policy import SchedulingPolicy
from kvpool.worker_service.engine.request import AnswerFork, GenerationParams, Request
from kvpool.worker_service.engine.results import computed, next_tokens
from kvpool.worker_service.engine.scheduler import Scheduled, Scheduler
from kvpool.worker_service.step import BeamCandidate, BeamCandidates, PartResult, SampledToken
from tests.cache_groups import groups_of
from tests.tracer_beams import search_anew


def token_at(sequence_id: str, position: int) -> int:
    """The one right token: it tells whose it is, and where it stands."""
    request, _, answer = sequence_id.partition(".")
    return int(answer or 0) * 10_000_000 + int(request) * 100_000 + position


def candidates_of(tokens: Sequence[int], count: int) -> BeamCandidates:
    """What a beam with these tokens may continue with: each token tells its place, and its rank among them."""
    first, size = tokens[0] // 100_000 * 100_000, hash(tuple(tokens))
    scores = accumulate(-0.125 * (1 + (size >> (3 * rank) & 7)) for rank in range(count))
    ids = ((1 + rank) * 10_000_000 + first + len(tokens) for rank in range(count))
    return BeamCandidates(
        [BeamCandidate(token_id, score, score) for token_id, score in zip(ids, scores, strict=True)], []
    )


def expected_beams(request: Request) -> list[list[int]]:
    """What a search finds that computes every text anew."""
    params = request.params
    assert params.beams is not None
    search = BeamSearch(params.beams, max_new_tokens=params.max_tokens, num_ending_ids=0)
    found = search_anew(search, lambda text, count: candidates_of([*params.token_ids, *text], count))
    return [text for text, _ in found]


class FakeCache:
    """What the scheduler sees of EngineCache. A block is a number; what is freed comes back with `settle`, as by an answered
    Free."""

    def __init__(self, num_blocks: int, block_size: int, state_grid: int = 0) -> None:
        self.block_size = block_size
        self.settings = CacheSettings(
            block_size=block_size,
            groups=groups_of((num_blocks, 9), grid=state_grid) if state_grid else groups_of((num_blocks,)),
        )
        self.blocks = list(range(1, num_blocks + 1))
        self.ending: list[CacheSequence] = []
        self.is_away = False
        """The reserve is empty, and the manager does not answer."""
        self.forks_hold_blocks = False
        self.num_tables: Counter[int] = Counter()
        """By block: tables that it is in."""
        self.num_freed: Counter[str] = Counter()

    @property
    def is_exhausted(self) -> bool:
        return not (self.blocks or self.ending or self.is_away)

    @property
    def lacks_blocks_for_forks(self) -> bool:
        return self.is_exhausted

    def num_needed(self, sequence: CacheSequence) -> int:
        """Blocks that its table lacks for all its tokens."""
        return max(0, -(-len(sequence.tokens) // self.block_size) - sequence.num_entries)

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        assert num_slots <= len(sequence.tokens)
        missing = max(0, -(-num_slots // self.block_size) - sequence.num_entries)
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
        taken = [self.blocks.pop() for _ in range(count)]
        self.num_tables.update(taken)
        sequence.tables[0].extend(taken)
        sequence.num_entries += count

    def fork(self, parent: CacheSequence, sequence_id: str) -> ForkedSequence | None:
        """Shares the full blocks, and copies the tail."""
        assert parent.state is SequenceState.LIVE
        assert not parent.in_step
        assert parent.num_computed_tokens == len(parent.tokens), "a fork begins where all is computed"
        num_shared, num_tail = divmod(len(parent.tokens), self.block_size)
        if num_tail and (self.is_away or not self.blocks):
            return None
        child = parent.alone(sequence_id)
        shared = parent.tables[0][:num_shared]
        child.tables, child.num_entries = (shared,), num_shared
        self.num_tables.update(shared)
        child.num_computed_tokens, child.state = len(parent.tokens), SequenceState.LIVE
        if not num_tail:
            return ForkedSequence(child, ())
        self.take(child, 1)
        return ForkedSequence(child, (BlockCopy(0, parent.tables[0][num_shared], child.tables[0][-1]),))

    def add_token(self, sequence: CacheSequence, token_id: int) -> None:
        assert not sequence.in_step
        sequence.tokens.append(token_id)

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
                self.num_tables.subtract(table)
                self.blocks += [block for block in table if not self.num_tables[block]]
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
        self.copies: list[AnswerFork] = []
        """Of the running step."""
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

    def fits(self, num_prompt: int, num_new: int, num_beams: int = 1) -> bool:
        """Whether such a request fits into the pool and the batch alone."""
        num_shared = num_prompt // self.cache.block_size if num_beams > 1 else 0
        num_all = -(-(num_prompt + num_new - 1) // self.cache.block_size)
        return (
            num_shared + num_beams * (num_all - num_shared) <= self.num_blocks
            and num_beams <= self.scheduler.max_num_seqs
        )

    def submit(
        self, num_prompt: int, num_new: int, *, n: int = 1, num_beams: int = 1, tenant: str = "", priority: int = 0
    ) -> Request:
        """A new request, which fits."""
        name = str(len(self.requests))
        assert self.fits(num_prompt, num_new, num_beams)
        prompt = [token_at(name, position) for position in range(num_prompt)]
        params = GenerationParams(
            name,
            1,
            prompt,
            max_tokens=num_new,
            tenant=tenant,
            priority=priority,
            num_answers=n,
            beams=BeamParams(num_beams) if num_beams > 1 else None,
        )
        sequence = CacheSequence(name, 1, common_pb2.Root(), prompt, max_new_tokens=num_new)
        kind = Request if num_beams == 1 else BeamRequest
        request = kind(params, sequence, num_new, frozenset(), None)
        self.requests.append(request)
        self.open.add(name)
        self.scheduler.add(request)
        return request

    def end(self, request: Request) -> None:
        """Its reader has gone, or it was refused. Nothing happens if it has ended."""
        for answer in request.answers:
            self.open.discard(answer.params.sequence_id)
            if self.scheduler.find(answer.sequence.id) is answer:
                self.scheduler.remove(answer)

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
        """One block for each live sequence that may still need one, and for each fork to come."""
        live = [one for request in self.scheduler for one in request.sequences if one.state is SequenceState.LIVE]
        num_tails = sum(sequence.num_forks_to_come for sequence in live)
        return num_tails + sum(sequence.num_blocks_to_come(self.cache.block_size) > 0 for sequence in live)

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
        decoding = [one for request in running for one in request.sequences if one.num_uncomputed_tokens == 1]
        num_preemptions = self.scheduler.num_preemptions
        # Beams that branch take blocks first, and some of them decode in the same step. Those that are computed again may lack
        # blocks.
        searches = [request for request in running if isinstance(request, BeamRequest)]
        may_take_more = any(
            search.is_branching
            or (search.num_generated and any(one.num_uncomputed_tokens > 1 for one in search.sequences))
            for search in searches
        )
        could_all_decode = not (self.cache.is_away or may_take_more) and sum(
            map(self.cache.num_needed, decoding)
        ) <= len(self.cache.blocks)
        self.batch = self.scheduler.schedule(now=0.0)
        # Those of beams that are resumed begin here: what is not common to all is computed once more.
        prompts = {
            one: one.num_uncomputed_tokens for r in running for one in r.sequences if one.num_uncomputed_tokens > 1
        }
        preempted = [request for request in running if request not in self.scheduler._running]
        assert self.scheduler.num_preemptions == num_preemptions + len(preempted)
        self.check_batch(running, decoding, prompts, preempted, could_all_decode)
        for part in self.batch:
            part.sequence.in_step = True
            self.computed[part.request.params.tenant] += part.num_tokens
            self.num_computed += part.num_tokens
        if self.batch:
            self.check_copies(self.scheduler.take_copies())
        return self.batch

    def check_copies(self, copies: Sequence[AnswerFork]) -> None:
        """Each is from one block to another that nothing else has."""
        targets = [copy.target for fork in copies for copy in fork.copies]
        assert len(targets) == len(set(targets))
        assert all(self.cache.num_tables[target] == 1 for target in targets)

    def land(self) -> None:
        """The step has completed."""
        batch, self.batch = self.batch, []
        results = [self._result(part) for part in batch]
        for part, result in zip(batch, results, strict=True):
            part.sequence.in_step = False
            done = computed(part, result)
            part.sequence.num_computed_tokens = done.num_computed_tokens
            if done.token is not None:
                part.sequence.tokens.append(done.token)
        for part, result in zip(batch, results, strict=True):
            request = part.request
            if self.scheduler.find(part.sequence.id) is not request:
                continue
            if isinstance(request, BeamRequest):
                if part.samples and request.take_row(part.sequence, result.candidates) and request.is_over:
                    self._finish_beams(request)
            elif result.token is not None:
                for answer, token in next_tokens(self.scheduler, cast(EngineCache, self.cache), request, result):
                    self.open.add(answer.params.sequence_id)
                    answer.take(token)
                    if answer.deliver(token):
                        self._finish(answer)

    def _result(self, scheduled: Scheduled) -> PartResult:
        """What the model computes."""
        part, sequence, request = scheduled.part(), scheduled.sequence, scheduled.request
        if part.sampling is None:
            return PartResult()
        if part.num_candidates:
            return PartResult(candidates=candidates_of(sequence.tokens, part.num_candidates))
        name, position = request.params.sequence_id, len(sequence.tokens)
        names = [name, *(answer_id(name, index) for index in range(1, 1 + len(part.forks)))]
        token, *forks = (SampledToken(token_at(one, position)) for one in names)
        return PartResult(token, forks=tuple(forks))

    def _finish(self, request: Request) -> None:
        name = request.params.sequence_id
        self.open.remove(name)
        self.finished.add(name)
        self.scheduler.remove(request)

    def _finish_beams(self, request: BeamRequest) -> None:
        request.finish()
        texts: dict[int, list[int]] = {}
        while (chunk := request.stream.take()) is not None:
            texts.setdefault(chunk.index, []).extend(token.token_id for token in chunk.tokens)
        assert list(texts.values()) == expected_beams(request)[: request.params.num_answers]
        self._finish(request)

    def step(self) -> list[Scheduled]:
        """A whole step."""
        batch = self.launch()
        self.land()
        return batch

    def turns(self, count: int = 1) -> None:
        """An answered Allocate and a whole step, so many times."""
        for _ in range(count):
            self.talk()
            self.step()

    def run_dry(self) -> None:
        """Until all requests have ended: somebody always gets on."""
        self.cache.is_away = False
        num_idle = 0
        while self.open:
            before = self.num_computed, self.scheduler.num_preemptions, len(self.open)
            self.wake()
            self.talk()
            self.step()
            self.check_books()
            # Beams may have to wait until what they have freed has come back.
            num_idle = (
                num_idle + 1 if before == (self.num_computed, self.scheduler.num_preemptions, len(self.open)) else 0
            )
            assert num_idle < 3, "nobody gets on"
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
        joining = [
            request
            for request in scheduler.waiting
            if request.sequence.state in (SequenceState.LIVE, SequenceState.ALLOCATING)
        ]
        placed = self.num_places([*scheduler._running, *joining])
        num_unanswered = self.num_places(requests[: sum(unanswered)])
        assert self.num_places(requests) <= max(scheduler.max_num_seqs - placed, num_unanswered)
        others = requests[sum(unanswered) :]
        levels = [request.rank.level for request in others]
        assert levels == sorted(levels), "a worse level goes before a better one"
        ready = [
            request
            for request in scheduler.waiting
            if request.sequence.state is SequenceState.WAITING and not request.sequence.maybe_granted
        ]
        if len(others) < len(ready):
            most = max(self.num_places([request]) for request in ready if request not in others)
            assert placed + self.num_places(requests) + most > scheduler.max_num_seqs, "a place is left empty"
        for payer in {(request.rank.level, request.params.tenant) for request in ready}:
            mine = [request for request in others if (request.rank.level, request.params.tenant) == payer]
            of_all = [request for request in ready if (request.rank.level, request.params.tenant) == payer]
            assert mine == of_all[: len(mine)], "a younger request of the same tenant goes first"
        passed_over = [request.rank.level for request in ready if request not in others]
        assert not (levels and passed_over) or levels[-1] <= min(passed_over), "a better level is passed over"

    def num_places(self, requests: Sequence[Request]) -> int:
        """Sequences that they will have in the batch."""
        return sum(min(request.num_places, self.scheduler.max_num_seqs) for request in requests)

    def check_batch(
        self,
        running: list[Request],
        decoding: list[CacheSequence],
        prompts: dict[CacheSequence, int],
        preempted: list[Request],
        could_all_decode: bool,
    ) -> None:
        """`decoding` and `prompts` (how much of them is not computed): of the requests that were running before."""
        scheduler, batch = self.scheduler, self.batch
        assert self.num_places(list(scheduler._running)) <= scheduler.max_num_seqs
        assert scheduler.num_running <= scheduler.max_num_seqs
        # The budget.
        assert sum(part.num_tokens for part in batch) <= scheduler.max_num_batched_tokens
        assert len({id(part.sequence) for part in batch}) == len(batch)
        # Nothing without its blocks, and no block written that another sequence has too.
        for part in batch:
            sequence = part.sequence
            assert sequence in part.request.sequences
            assert part.request in scheduler._running
            assert sequence.state is SequenceState.LIVE
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + part.num_tokens
            assert 1 <= part.num_tokens <= len(sequence.tokens) - sequence.num_computed_tokens
            assert sequence.num_entries * self.cache.block_size >= end, "a slot without a block"
            assert part.samples == (end == len(sequence.tokens))
            written = sequence.tables[0][start // self.cache.block_size : -(-end // self.cache.block_size)]
            assert all(self.cache.num_tables[block] == 1 for block in written), "a shared block is written"
        # The pace of those that decode.
        scheduled = {part.sequence: part.num_tokens for part in batch}
        if could_all_decode:
            assert not preempted
            assert all(sequence in scheduled for sequence in decoding), "a sequence that could decode is left out"
        left = {sequence: count for sequence, count in prompts.items() if sequence.state is SequenceState.LIVE}
        num_prefilled = sum(scheduled.get(sequence, 0) for sequence in left)
        num_decoded = len(batch) - sum(sequence in scheduled for sequence in left)
        room = scheduler.max_num_batched_tokens - num_decoded
        if any(sequence not in left for request in scheduler._running for sequence in request.sequences):
            room = min(room, scheduler.max_mixed_prefill_tokens)
        assert num_prefilled <= room, "too much is prefilled beside a decode"
        # No room is left while something could be computed, and a worse level has it only if a better one needs no more. Beams that
        # are computed again may lack blocks.
        of_beams = {one for r in scheduler._running if isinstance(r, BeamRequest) for one in r.sequences}
        if not of_beams.intersection(left) and not preempted:
            assert num_prefilled == min(room, sum(left.values()))
            level_of = {one: request.rank.level for request in scheduler._running for one in request.sequences}
            worst = max((level_of[sequence] for sequence in left if sequence in scheduled), default=0)
            for sequence, wanted in left.items():
                if level_of[sequence] < worst:
                    assert scheduled.get(sequence, 0) == wanted, "a worse level is computed first"
        # Blocks are given back only if there are none and none are on their way; by the last in rank. By one alone, if only its end
        # is sure to bring some back.
        assert not preempted or not (self.cache.blocks or self.cache.is_away)
        assert len(preempted) <= 1
        remaining = [request.rank for request in running if request not in preempted]
        assert not preempted or remaining or self.cache.forks_hold_blocks
        assert all(request.rank > other for request in preempted for other in remaining)
        assert all(request in scheduler.waiting for request in preempted)

    def check_books(self) -> None:
        """No request is lost or doubled, nor any of its tokens, nor any block."""
        scheduler = self.scheduler
        known = [request.params.sequence_id for request in scheduler]
        assert set(known) == self.open
        queued = [*scheduler.waiting, *scheduler._running]
        assert all(scheduler.find(one.id) is request for request in queued for one in request.sequences)
        # So it is found when it is to be ended.
        assert all(request.sequence in request.sequences for request in queued)
        assert Counter(request.params.sequence_id for request in queued) == Counter(known)
        for queue in (scheduler.waiting, scheduler._running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(set(ranks))
            assert queue.num_prompt_tokens == sum(request.num_prompt_tokens for request in queue)
        for arrival, request in enumerate(self.requests, 1):
            assert request.rank.arrival == arrival, "a request has lost its place"
            for answer in request.answers:
                assert answer.rank == request.rank._replace(answer=answer.index)
                self.check_tokens(answer)
        sequences = [one for request in queued for one in request.sequences] + self.cache.ending
        tables = [one.tables[0] for one in dict.fromkeys(sequences) if one.tables]
        held = Counter(block for table in tables for block in table)
        assert held == +self.cache.num_tables
        assert sorted([*held, *self.cache.blocks]) == list(range(1, self.num_blocks + 1))

    def check_tokens(self, request: Request) -> None:
        """All its tokens are right and in their places."""
        name, prompt = request.params.sequence_id, request.params.token_ids
        if isinstance(request, BeamRequest):
            if name in self.open and not request.is_branching and len(request.sequences) > 1:
                texts = [
                    sequence.tokens[len(prompt) :]
                    for sequence in request.sequences
                    if sequence.tokens[: len(prompt)] == prompt
                ]
                assert texts == request._texts()
            return
        tokens = request.sequence.tokens
        right = prompt + [token_at(name, position) for position in range(len(prompt), len(tokens))]
        assert tokens == right
        if name in self.open:
            assert request.num_generated == len(tokens) - request.num_prompt_tokens
