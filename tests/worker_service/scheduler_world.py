"""The engine step by step, over a cache side and the manager's core. Whatever its scheduler decides is held against its laws.
Requests have one answer or several, or are searched by beams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from kvpool.cache_service.core.messages import Limits
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache.link_state import MutatingCall
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.engine.beam_search import BeamParams
from kvpool.worker_service.engine.beams import BeamRequest
from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.engine.request import AnswerFork, GenerationParams, Request
from kvpool.worker_service.engine.scheduler import Scheduled, as_step
from kvpool.worker_service.engine.settings import EngineSettings
from tests.tracer import VOCAB_SIZE
from tests.worker_service.tracer_model import TracerModel
from tests.worker_service.windowed import Worker
from tests.worker_service.world import right_texts


class SchedulerWorld(Worker):
    """Requests, and the laws. `talk` makes the calls that are due, `step` is one forward pass."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 32,
        max_mixed_prefill_tokens: int = 8,
        limits: Limits | None = None,
        **settings: Any,
    ) -> None:
        """`num_blocks`: without the null block. `limits`: the manager's. `settings`: more of the engine's."""
        super().__init__((num_blocks + 1,), (), block_size=block_size, reserve_seconds=0.0, limits=limits)
        self.num_blocks = num_blocks
        self.is_away = False
        """The manager does not answer."""
        self.model = TracerModel(num_blocks + 1, block_size)
        engine_settings = EngineSettings(
            model_fingerprint="m",
            vocab_size=VOCAB_SIZE,
            max_model_len=4096,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            **settings,
        )
        self.engine = Engine(engine_settings, self.cache, self.model, clock=lambda: self.now)
        self.scheduler = self.engine.scheduler
        self.preempt = self.scheduler._preempt
        self.scheduler._preempt = self._check_and_preempt  # type: ignore[method-assign]
        self.requests: list[Request] = []
        """All that were ever submitted."""
        self.computed: Counter[str] = Counter()
        """Tokens that steps have computed, by tenant."""
        self.batch: list[Scheduled] = []
        """The running step."""
        self.copies: list[AnswerFork] = []
        """Those that it makes."""
        self._cancelled: dict[Request, int] = {}
        """Those whose readers have gone, and the tokens that they had then."""
        self._in_flight: tuple[MutatingCall, Any] | None = None
        """A call, and its answer, which is on its way."""

    @property
    def num_computed(self) -> int:
        """Tokens that steps have computed."""
        return self.computed.total()

    @property
    def open(self) -> list[Request]:
        """All answers that have not ended."""
        requests = [request for request in self.requests if request not in self._cancelled]
        return [answer for request in requests for answer in request.answers if answer.finish_reason is None]

    # -- what happens

    def submit(
        self,
        num_prompt: int,
        num_new: int,
        *,
        name: str = "",
        num_shared: int = 0,
        n: int = 1,
        num_beams: int = 1,
        **params: Any,
    ) -> Request:
        """A new request; its prompt begins with `num_shared` tokens as others do. Raises EngineError."""
        number = len(self.requests)
        prompt = [*range(4000, 4000 + num_shared), *[number] * num_prompt][:num_prompt]
        beams = BeamParams(num_beams) if num_beams > 1 else None
        asked = GenerationParams(
            name or str(number), 1, prompt, max_tokens=num_new, num_answers=n, beams=beams, **params
        )
        self.requests.append(self.engine.submit(asked))
        return self.requests[-1]

    def cancel(self, request: Request) -> None:
        """Its reader has gone. Nothing happens if it has ended."""
        self._cancelled.setdefault(request, request.num_generated_in_all)
        self.engine.abort(request)

    def send(self) -> None:
        """The call that is due, whose answer comes when they talk again."""
        if not self.is_away and (call := self.cache.next_call(self.candidates, self.now)) is not None:
            self._in_flight = call, self.execute(call.request)

    def talk(self, *, lose_answer: bool = False) -> None:
        """All calls that are due; `lose_answer`: up to an Allocate, which is executed, and its answer is lost."""
        if self._in_flight is not None:
            self.cache.on_reply(*self._in_flight, self.now)
            self._in_flight = None
        link = self.cache.state.link
        assert link is not None
        self.now = max(self.now + 1.0, link.retry_at)
        last = len(self.methods) + 50
        while not self.is_away and (call := self.cache.next_call(self.candidates, self.now)) is not None:
            answer = self.execute(call.request)
            if lose_answer and isinstance(call.request, cache_pb2.AllocateRequest):
                self.cache.on_failure(call, "", self.now)
                return
            self.cache.on_reply(call, answer, self.now)
            assert len(self.methods) < last, f"calls without end: {self.methods[-6:]}"

    def candidates(self) -> list[CacheSequence]:
        """Those of the scheduler."""
        candidates = self.scheduler.candidates()
        self.check_candidates(candidates)
        return candidates

    @contextmanager
    def with_spare(self, count: int) -> Iterator[None]:
        """The reserve has this many blocks meanwhile; the others are kept aside."""
        reserve = self.cache.state.reserves[0]
        aside = [reserve.take() for _ in range(len(reserve) - count)]
        yield
        for block, generation in aside:
            reserve.add(block, generation)

    def begin_step(self) -> list[Scheduled]:
        """Schedule a step, and check what was decided."""
        assert not self.batch
        self.engine._take_events()
        running = list(self.scheduler._running)
        decoding = [one for request in running for one in request.sequences if one.num_uncomputed_tokens == 1]
        num_preemptions = self.scheduler.num_preemptions
        # Beams that branch take blocks first, and some of them decode in the same step. Those that are computed again may lack
        # blocks.
        may_take_more = any(
            search.is_branching
            or (search.num_generated and any(one.num_uncomputed_tokens > 1 for one in search.sequences))
            for search in running
            if isinstance(search, BeamRequest)
        )
        needed = [one.group_tables[0].num_missing(one.num_computed_tokens, len(one.tokens)) for one in decoding]
        could_all_decode = not may_take_more and sum(needed) <= self.cache.num_spare_blocks[0]
        self.batch = self.scheduler.schedule(self.now)
        # Those of beams that are resumed begin here: what is not common to all is computed once more.
        prompts = {
            one: one.num_uncomputed_tokens for r in running for one in r.sequences if one.num_uncomputed_tokens > 1
        }
        preempted = [request for request in running if request not in self.scheduler._running]
        assert self.scheduler.num_preemptions == num_preemptions + len(preempted)
        self.check_batch(decoding, prompts, preempted, could_all_decode)
        for part in self.batch:
            self.computed[part.request.params.tenant] += part.num_tokens
        if self.batch:
            self.cache.begin_step([part.sequence for part in self.batch])
            self.copies = self.scheduler.take_copies()
        return self.batch

    def end_step(self) -> None:
        """The step has completed. The texts of those that have ended are the right ones."""
        batch, self.batch = self.batch, []
        if batch:
            self.engine._finish_step(batch, self.model.execute(as_step(batch, self.copies)), self.now)
        self.engine._deliver()
        for request in {part.request.answers[0] for part in batch} - self._cancelled.keys():
            if request.stream.is_finished:
                texts: list[list[int]] = [[] for _ in range(request.params.num_answers)]
                while (chunk := request.stream.take()) is not None:
                    texts[chunk.index] += [token.token_id for token in chunk.tokens]
                assert texts == right_texts(request)

    def whole_step(self) -> list[Scheduled]:
        """A step, from its beginning to its end."""
        batch = self.begin_step()
        self.end_step()
        return batch

    def turns(self, count: int = 1) -> None:
        """Calls and a whole step, so many times."""
        for _ in range(count):
            self.talk()
            self.whole_step()

    def run_dry(self) -> None:
        """Until all requests have ended: somebody always gets on."""
        self.is_away = False
        num_idle = 0
        while self.open:
            before = self.num_computed, self.scheduler.num_preemptions, len(self.open)
            self.turns()
            self.check_books()
            after = self.num_computed, self.scheduler.num_preemptions, len(self.open)
            # Beams may have to wait until what they have freed has come back.
            num_idle = num_idle + 1 if before == after else 0
            assert num_idle < 3, "nobody gets on"
        self.talk()
        assert self.cache.is_idle, "blocks have leaked"
        assert self.held() == (0,)
        self.check()
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
        for payer in {request.payer for request in ready}:
            mine = [request for request in others if request.payer == payer]
            of_all = [request for request in ready if request.payer == payer]
            assert mine == of_all[: len(mine)], "a younger request of the same tenant goes first"
        passed_over = [request.rank.level for request in ready if request not in others]
        assert not (levels and passed_over) or levels[-1] <= min(passed_over), "a better level is passed over"

    def num_places(self, requests: Sequence[Request]) -> int:
        """Sequences that they will have in the batch."""
        return sum(min(request.num_places, self.scheduler.max_num_seqs) for request in requests)

    def _check_and_preempt(self, request: Request, now: float) -> None:
        """Blocks are given back only if there are none, here and at the manager; by the last in rank. By one alone, if only its end
        is sure to bring some back."""
        running = list(self.scheduler._running)
        assert request is running[-1]
        assert len(running) > 1 or self.cache.forks_hold_blocks
        assert self.cache.num_spare_blocks == (0,)
        (counts,) = self.manager.sessions[0].counts()
        assert counts.free + counts.cached == 0
        self.preempt(request, now)

    def check_batch(
        self,
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
            assert sequence.num_entries * self.block_size >= end, "a slot without a block"
            assert part.samples == (end == len(sequence.tokens))
            written = sequence.tables[0][start // self.block_size : -(-end // self.block_size)]
            assert all(self.num_users(block) == 1 for block in written), "a shared block is written"
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
        assert all(request in scheduler.waiting for request in preempted)

    def num_users(self, block: int) -> int:
        """Tables that a block is in."""
        return self.cache.state.ledgers[0]._num_users[block]

    def check_books(self) -> None:
        """No request is lost or doubled, nor any block, and nothing comes for those whose readers have gone."""
        scheduler = self.scheduler
        assert all(request.num_generated_in_all == count for request, count in self._cancelled.items())
        assert set(scheduler) == set(self.open)
        queued = [*scheduler.waiting, *scheduler._running]
        assert Counter(queued) == Counter(self.open)
        assert all(scheduler.find(one.id) is request for request in queued for one in request.sequences)
        # So it is found when it is to be ended.
        assert all(request.sequence in request.sequences for request in queued)
        for queue in (scheduler.waiting, scheduler._running):
            ranks = [request.rank for request in queue]
            assert ranks == sorted(set(ranks))
            assert queue.num_prompt_tokens == sum(request.num_prompt_tokens for request in queue)
        for arrival, request in enumerate(self.requests, 1):
            assert request.rank.arrival == arrival, "a request has lost its place"
            for answer in request.answers:
                assert answer.rank == request.rank._replace(answer=answer.index)
        sequences = [one for request in queued for one in request.sequences] + self.cache.state.ending
        held = Counter(block for one in dict.fromkeys(sequences) if one.uses_blocks for block in one.tables[0])
        assert held == {block: count for block in range(1 + self.num_blocks) if (count := self.num_users(block))}
