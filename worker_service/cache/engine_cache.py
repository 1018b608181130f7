"""The engine's side of the cache: block tables of live sequences, the reserve, and what to tell the manager next.

Sans I/O and without a clock. The engine calls the methods of the first part between steps; whoever does the I/O asks `next_call`,
sends it, and hands back `on_reply` or `on_failure`. One owner, one thread. Nothing here ever waits: a decode that needs a block
takes it from the reserve or goes without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.v1 import cache_pb2, common_pb2

from . import calls, events
from .ledger import BlockLedger, DisagreementError
from .link import Call, Link, Stated
from .reserve import Reserve, spare_target
from .sequence import CacheSequence, SequenceId, SequenceState
from .status import reason_of

# A session that answers one of these knows something else than this worker does: only a new session helps.
_SESSION_ENDING = frozenset(
    {"STALE_SESSION", "STALE_REGISTER", "STALE_GENERATION", "TOKENS_DIFFER", "GAP", "UNKNOWN_SEQUENCE"}
)

NO_BLOCKS_RETRY_SECONDS = 1.0
"""When to ask again after NO_BLOCKS although nothing was given back; only a safeguard."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How the cache side behaves towards the manager."""

    block_size: int = 16
    """Token slots of one block."""
    num_blocks: int = 1024
    """Blocks of the pool, the null block included."""
    report_seconds: float = 0.05
    """Filled blocks are reported at most this late, many in one call; sooner if another sequence waits for them."""
    reserve_seconds: float = 2.0
    """How many seconds of decoding the reserve should last without the manager."""
    prefix_wait_seconds: float = 10.0
    """How long a request waits for a prefix in flight that makes no progress, before it computes it itself."""
    max_items_per_call: int = 256
    """Sequences in one call to the manager."""


class EngineCache:
    """All of a worker's sequences and blocks, and the link that keeps the manager informed of them."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.num_reserve_waits = 0
        """How often a decode went without a block although the pool had some: it waited for an RPC."""
        self.num_calls = 0
        """Mutating calls sent, over all sessions."""
        self._events: list[events.Event] = []
        self._tokens_per_second = 0.0
        self._last_step_at: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._link: Link | None = None
        self._ledger = BlockLedger(self.settings.num_blocks)
        self._reserve = Reserve()
        self._sequences: dict[SequenceId, CacheSequence] = {}
        """Live and ending sequences, and those the manager may hold blocks for."""
        self._ending: list[CacheSequence] = []
        self._parked: list[CacheSequence] = []
        self._dirty_since: float | None = None
        self._urgent = False
        self._ask_again_at = 0.0
        """The last Allocate found no blocks: no other before this time, unless something is given back."""
        self._exhausted = False
        """The last call left fewer blocks in the pool than the reserve wanted."""
        self._lost = False

    # -- for the engine: sequences

    def is_ready(self) -> bool:
        """Whether a session is open."""
        return self._link is not None and not self._lost

    @property
    def num_spare_blocks(self) -> int:
        """Blocks in the reserve."""
        return len(self._reserve)

    @property
    def is_exhausted(self) -> bool:
        """Whether the reserve is empty because the pool is: the manager has said so, and nothing is on its way back."""
        return self._exhausted and not self._reserve and not self._ending

    @property
    def is_idle(self) -> bool:
        """Whether the manager has acknowledged that nothing is held or reserved here."""
        return not (self._sequences or self._ending or self._reserve or self._reserve.returning)

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        """Make the table cover `num_slots` positions out of the reserve. False, and nothing changed, if it is too small."""
        num_missing = -(-num_slots // self.settings.block_size) - len(sequence.table)
        if num_missing > len(self._reserve):
            if not self.is_exhausted:
                self.num_reserve_waits += 1
            return False
        for _ in range(num_missing):
            block, generation = self._reserve.take()
            self._ledger.use(block)
            sequence.table.append(block)
            sequence.generations.append(generation)
        return True

    def begin_step(self, sequences: Iterable[CacheSequence]) -> None:
        """A step that names the blocks of these sequences is being launched."""
        for sequence in sequences:
            assert sequence.state is SequenceState.LIVE
            assert not sequence.in_step
            sequence.in_step = True

    def end_step(self, computed: Iterable[tuple[CacheSequence, int, int | None]], now: float) -> None:
        """The step has completed: for each sequence, how many tokens have their KV now, and the token sampled, if any."""
        num_sampled = 0
        for sequence, num_computed, token in computed:
            sequence.in_step = False
            self._advance(sequence, num_computed, now)
            if token is not None:
                num_sampled += 1
                sequence.tokens.append(token)
        if self._last_step_at is not None and now > self._last_step_at:
            rate = num_sampled / (now - self._last_step_at)
            self._tokens_per_second += 0.1 * (rate - self._tokens_per_second)
        self._last_step_at = now

    def fail_step(self, sequences: Iterable[CacheSequence]) -> None:
        """The step broke off: nothing is known to be computed, and no device work names the blocks any more."""
        for sequence in sequences:
            sequence.in_step = False

    def _advance(self, sequence: CacheSequence, num_computed: int, now: float) -> None:
        size = self.settings.block_size
        first, last = sequence.num_computed_tokens // size, num_computed // size
        sequence.num_computed_tokens = num_computed
        if last == first:
            return
        for index in range(first, last):
            self._ledger.complete(sequence.table[index])
        if self._dirty_since is None:
            self._dirty_since = now
        self._urgent = self._urgent or any(
            parked.parked_on == sequence.id and num_computed >= parked.parked_position for parked in self._parked
        )

    def free(self, sequence: CacheSequence) -> None:
        """The engine is done with the sequence, in whatever state it is. Its blocks go back when no step names them."""
        state = sequence.state
        if state in (SequenceState.ENDING, SequenceState.ENDED):
            return
        if state is SequenceState.PARKED:
            self._parked.remove(sequence)
        if state is SequenceState.LIVE or sequence.maybe_granted:
            sequence.state = SequenceState.ENDING
            self._ending.append(sequence)
        else:
            self._end(sequence)

    def preempt(self, sequence: CacheSequence) -> CacheSequence:
        """Take the blocks of a live sequence back; returns the same request in its next round, waiting to be allocated.

        The old round lives on here until its Free is answered; only then may the new one be allocated.
        """
        assert sequence.state is SequenceState.LIVE
        again = CacheSequence(
            sequence.id.sequence_id,
            sequence.id.attempt,
            sequence.root,
            sequence.tokens,
            max_new_tokens=sequence.max_tokens - len(sequence.tokens),
            max_cached_tokens=sequence.max_cached_tokens,
            no_wait=sequence.no_wait,
        )
        again.round = sequence.round + 1
        self.free(sequence)
        return again

    def take_events(self) -> list[events.Event]:
        """What has happened since the last call."""
        taken, self._events = self._events, []
        return taken

    # -- for the edge: sessions

    @property
    def is_lost(self) -> bool:
        """Whether the session must be given up: the engine has to end its streams and steps, then `reset`."""
        return self._lost

    def lose(self, why: str) -> None:
        """Give the session up; the engine is told by an event."""
        if not self._lost:
            self._lost = True
            self._events.append(events.SessionLost(why))

    def reset(self) -> None:
        """Forget all blocks. Only when no step is running and no stream lives."""
        assert not any(sequence.in_step for sequence in self._sequences.values())
        for sequence in [*self._sequences.values(), *self._ending, *self._parked]:
            self._end(sequence)
        self._clear()

    def on_registered(self, response: cache_pb2.RegisterResponse) -> None:
        """A session is open; whatever was unanswered before belongs to the past."""
        self._link = Link(response.session)

    def keep_alive(self, load: common_pb2.WorkerLoad) -> cache_pb2.KeepAliveRequest | None:
        """The next heartbeat; None without a session."""
        if self._link is None or self._lost:
            return None
        request = cache_pb2.KeepAliveRequest(
            session=self._link.session, downlink_ack=self._link.applied_number, load=load
        )
        request.counts.add(
            group=0,
            tier=common_pb2.TIER_DEVICE,
            capacity=self.settings.num_blocks - 1,
            held=self._ledger.num_used,
            reserved=len(self._reserve),
        )
        return request

    def on_keep_alive(self, session: int, response: cache_pb2.KeepAliveResponse) -> None:
        """A heartbeat of `session` was answered."""
        if self._link is not None and self._link.session == session and not self._lost:
            self._guarded(lambda: self._apply(response.downlink))

    # -- for the edge: calls

    def next_call(self, candidates: Callable[[], List[CacheSequence]], now: float) -> Call | None:
        """The next mutating call, if there is something to say and none is in flight.

        `candidates` names the WAITING sequences that the engine would run now, in order. It is asked after parked ones have
        been woken, so that they can be among them.
        """
        link = self._link
        if link is None or self._lost or link.in_flight is not None or now < link.retry_at:
            return None
        self._wake_parked(now)
        call = self._free_call(link) or self._append_call(link, now) or self._allocate_call(link, candidates(), now)
        if call is not None:
            link.in_flight = call
            self.num_calls += 1
        return call

    def next_call_at(self, now: float) -> float | None:
        """When to ask `next_call` again if nothing else happens; None: only when something does."""
        link = self._link
        if link is None or self._lost or link.in_flight is not None:
            return None
        times = []
        if self._dirty_since is not None:
            times.append(self._dirty_since + self.settings.report_seconds)
        if self._parked:
            times.append(now + self.settings.prefix_wait_seconds / 4)
        if now < self._ask_again_at:
            times.append(self._ask_again_at)
        if now < link.retry_at:
            times = [link.retry_at]
        return min(times, default=None)

    def on_reply(
        self,
        call: Call,
        response: cache_pb2.AllocateResponse | cache_pb2.AppendResponse | cache_pb2.FreeResponse,
        now: float,
    ) -> None:
        """The call was executed. A reply to a call given up before is dropped whole."""
        link = self._link
        if link is None or self._lost or link.in_flight is not call:
            return
        link.in_flight = None
        link.succeeded()
        if call.returned:
            self._reserve.returned(call.returned)
            self._ask_again_at = now

        def take_in() -> None:
            # Grants first: a table may name a block that an earlier entry of the downlink brought.
            self._apply(response.downlink)
            if isinstance(response, cache_pb2.AllocateResponse):
                for stated, result in zip(call.stated, response.results, strict=True):
                    self._on_allocated(stated.sequence, result, now)
            elif isinstance(response, cache_pb2.AppendResponse):
                for stated, appended in zip(call.stated, response.results, strict=True):
                    self._on_appended(stated, appended, now)
            else:
                for stated in call.stated:
                    self._on_freed(stated.sequence)
                self._ask_again_at = now

        self._guarded(take_in)
        self._exhausted = len(self._reserve) < self._spare_target() and not self._num_available(response.downlink)

    def on_failure(self, call: Call, reason: str, now: float) -> None:
        """The call was not answered or refused whole; `reason` is its ErrorInfo.reason, empty for the transport's own errors.

        Its state goes out again under a larger call_no. What it may have done meanwhile comes to light with the next reply.
        """
        link = self._link
        if link is None or self._lost or link.in_flight is not call:
            return
        link.in_flight = None
        if reason == "STALE_SESSION":
            self.lose("the manager no longer knows this session")
            return
        link.failed(now)
        self._urgent = True
        if isinstance(call.request, cache_pb2.AllocateRequest):
            for stated in call.stated:
                if stated.sequence.state is SequenceState.ALLOCATING:
                    stated.sequence.state = SequenceState.WAITING

    # -- building calls

    def _spare_target(self) -> int:
        live = [sequence for sequence in self._sequences.values() if sequence.state is SequenceState.LIVE]
        size = self.settings.block_size
        to_come = sum(sequence.num_blocks_to_come(size) for sequence in live)
        return spare_target(len(live), to_come, self._tokens_per_second, self.settings.reserve_seconds, size)

    def _wish(self, named: Iterable[CacheSequence]) -> int:
        """Blocks wanted in the reserve once a call that names all entries of `named` has been executed: spare, and bound to
        other sequences but not named yet."""
        skip = {id(sequence) for sequence in named}
        unnamed = sum(
            len(sequence.table) - sequence.acked_entries
            for sequence in self._sequences.values()
            if id(sequence) not in skip
        )
        target = self._spare_target()
        surplus = len(self._reserve) - target
        # Give back only what is clearly too much, or everything when idle; else every report would shuffle a few blocks.
        if surplus > 0 and (target == 0 or surplus > target):
            self._reserve.give_up(surplus)
        return max(target, len(self._reserve)) + unnamed

    def _free_call(self, link: Link) -> Call | None:
        ready = [sequence for sequence in self._ending if not sequence.in_step][: self.settings.max_items_per_call]
        if not ready:
            return None
        # From here on nothing here touches their blocks: the manager may grant them anew before its answer has arrived.
        for sequence in ready:
            self._let_go(sequence)
        return calls.free_call(link, ready, self._wish(ready), self._reserve.returning)

    def _append_call(self, link: Link, now: float) -> Call | None:
        size = self.settings.block_size
        reports = [
            sequence
            for sequence in self._sequences.values()
            if sequence.state is SequenceState.LIVE
            and sequence.num_computed_tokens // size * size > sequence.acked_computed_tokens
        ][: self.settings.max_items_per_call]
        if not reports:
            self._dirty_since, self._urgent = None, False
        due = self._dirty_since is not None and now >= self._dirty_since + self.settings.report_seconds
        if not (due or (reports and self._urgent) or self._wants_refill() or self._has_idle_surplus()):
            return None
        return calls.append_call(link, reports, size, self._wish(reports), self._reserve.returning)

    def _wants_refill(self) -> bool:
        """Whether the reserve has shrunk so far that it should not wait for the next report."""
        target = self._spare_target()
        return len(self._reserve) < (target + 1) // 2 and not self._exhausted

    def _has_idle_surplus(self) -> bool:
        idle = bool(self._reserve) and self._spare_target() == 0
        return idle or bool(self._reserve.returning)

    def _allocate_call(self, link: Link, candidates: List[CacheSequence], now: float) -> Call | None:
        hold_back = now < self._ask_again_at or (self._exhausted and self._spare_target() > len(self._reserve))
        # An Allocate that was not answered is asked again even then: what it got, if it got something, nobody else can use.
        wanted = [
            sequence
            for sequence in candidates
            if sequence.state is SequenceState.WAITING
            and (sequence.maybe_granted or not hold_back)
            and self._sequences.get(sequence.id, sequence) is sequence
        ][: self.settings.max_items_per_call]
        if not wanted:
            return None
        for sequence in wanted:
            sequence.state = SequenceState.ALLOCATING
            sequence.maybe_granted = True
            self._sequences[sequence.id] = sequence
        return calls.allocate_call(link, wanted, self._wish(()), self._reserve.returning)

    # -- taking in replies

    def _guarded(self, take_in: Callable[[], None]) -> None:
        try:
            take_in()
        except DisagreementError as error:
            self.lose(f"the manager and this worker disagree: {error}")

    def _num_available(self, downlink: cache_pb2.Downlink) -> int:
        return sum(counts.free + counts.cached for counts in downlink.counts)

    def _apply(self, downlink: cache_pb2.Downlink) -> None:
        assert self._link is not None
        for entry in self._link.new_entries(downlink):
            if entry.HasField("grant"):
                for block, generation in zip(entry.grant.block_ids, entry.grant.generations, strict=True):
                    self._ledger.accept_grant(block, generation)
                    self._reserve.add(block, generation)
            elif entry.HasField("stop"):
                sequence = self._sequences.get(SequenceId(entry.stop.sequence_id, entry.stop.attempt))
                if sequence is not None and sequence.state is not SequenceState.ENDING:
                    self._events.append(events.Stopped(sequence))

    def _on_allocated(self, sequence: CacheSequence, result: cache_pb2.AllocateResult, now: float) -> None:
        withdrawn = sequence.state is SequenceState.ENDING
        if result.status.code == 0 and result.HasField("granted"):
            self._take_table(sequence, result.granted)
            if not withdrawn:
                sequence.state = SequenceState.LIVE
                self._events.append(events.Granted(sequence))
            return
        # Refused or told to wait: the manager holds nothing for it.
        sequence.maybe_granted = False
        self._sequences.pop(sequence.id, None)
        if withdrawn:
            self._ending.remove(sequence)
            self._end(sequence)
            return
        if result.status.code == 0:
            self._park(sequence, result.wait, now)
            return
        reason = reason_of(result.status)
        if reason in ("NO_BLOCKS", "NOT_TRIED", "TOO_MANY_SEQUENCES"):
            sequence.state = SequenceState.WAITING
            self._ask_again_at = now + NO_BLOCKS_RETRY_SECONDS
        else:
            self._end(sequence)
            self._events.append(events.Refused(sequence, result.status))

    def _take_table(self, sequence: CacheSequence, granted: cache_pb2.Granted) -> None:
        """Enter a granted table: leading blocks as hits, the others as grants."""
        run = granted.tables[0]
        sequence.uses_blocks = True
        num_hits = granted.num_cached_tokens // self.settings.block_size
        for index, (block, generation) in enumerate(zip(run.block_ids, run.generations, strict=True)):
            if index < num_hits:
                self._ledger.accept_hit(block, generation)
            else:
                self._ledger.accept_grant(block, generation)
            self._ledger.use(block)
            sequence.table.append(block)
            sequence.generations.append(generation)
        sequence.num_cached_tokens = sequence.num_computed_tokens = granted.num_cached_tokens
        sequence.acked_tokens = len(sequence.tokens)
        sequence.acked_entries = len(sequence.table)
        sequence.acked_computed_tokens = granted.num_cached_tokens

    def _on_appended(self, stated: Stated, result: cache_pb2.AppendResult, now: float) -> None:
        sequence = stated.sequence
        if result.status.code:
            reason = reason_of(result.status)
            if reason == "STALE_ATTEMPT":
                if sequence.state is SequenceState.LIVE:
                    self._events.append(events.Stopped(sequence))
            elif sequence.state is SequenceState.LIVE:
                raise DisagreementError(f"an Append of {sequence!r} was refused with {reason}: {result.status.message}")
            return
        if stated.num_computed_tokens > sequence.acked_computed_tokens:
            sequence.progress_at = now
        sequence.acked_tokens = max(sequence.acked_tokens, stated.num_tokens)
        sequence.acked_entries = max(sequence.acked_entries, stated.num_entries)
        sequence.acked_computed_tokens = max(sequence.acked_computed_tokens, stated.num_computed_tokens)

    def _on_freed(self, sequence: CacheSequence) -> None:
        self._ending.remove(sequence)
        self._end(sequence)

    def _let_go(self, sequence: CacheSequence) -> None:
        if sequence.uses_blocks:
            sequence.uses_blocks = False
            for block in sequence.table:
                self._ledger.drop(block)

    def _end(self, sequence: CacheSequence) -> None:
        self._let_go(sequence)
        sequence.state = SequenceState.ENDED
        sequence.forget()
        if self._sequences.get(sequence.id) is sequence:
            del self._sequences[sequence.id]

    # -- prefixes in flight

    def _park(self, sequence: CacheSequence, wait: cache_pb2.Wait, now: float) -> None:
        sequence.state = SequenceState.PARKED
        sequence.parked_on = SequenceId(wait.leader.sequence_id, wait.leader.attempt)
        sequence.parked_position = wait.position
        sequence.parked_at = now
        self._parked.append(sequence)
        leader = self._sequences.get(sequence.parked_on)
        if leader is not None and leader.num_computed_tokens >= wait.position:
            self._urgent = True

    def _wake_parked(self, now: float) -> None:
        """Let sequences ask again whose prefix is reported, whose leader has ended, or whose leader makes no progress."""
        still: list[CacheSequence] = []
        for sequence in self._parked:
            assert sequence.parked_on is not None
            leader = self._sequences.get(sequence.parked_on)
            if leader is not None and leader.acked_computed_tokens < sequence.parked_position:
                if now < max(sequence.parked_at, leader.progress_at) + self.settings.prefix_wait_seconds:
                    still.append(sequence)
                    continue
                sequence.no_wait = True
            sequence.state = SequenceState.WAITING
        self._parked = still
