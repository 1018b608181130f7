"""The engine's side of the cache: block tables of live sequences, the reserve, and the next call to the manager.

Sans I/O and without a clock. The engine calls the methods of the first part between steps; the edge gets a call from `next_call`,
sends it, and passes the outcome to `on_reply` or `on_failure`. One owner, one thread. Nothing here waits: a decode that needs a
block takes it from the reserve, or skips the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from kvpool.v1 import cache_pb2, common_pb2

from . import boundaries, events, forks, naming, next_call, parking, replies
from .forks import ForkedSequence as ForkedSequence
from .ledger import DisagreementError
from .link_state import BACKOFF_MOST_SECONDS, MAX_STALE_CALLS, SESSION_OVER, LinkState, MutatingCall
from .sequence import CacheSequence, SequenceState
from .settings import CacheSettings
from .state import CacheState


class Computed(NamedTuple):
    """The result of a step for one sequence."""

    sequence: CacheSequence
    num_computed_tokens: int
    """Tokens from position 0 whose KV is complete now."""
    token: int | None
    """The token sampled, if any."""


class EngineCache:
    """All sequences and blocks of a worker, and the link that reports them to the manager."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.num_reserve_waits = 0
        """How often a decode skipped a step for lack of a spare block although the pool had some."""
        self.num_calls = 0
        """Mutating calls sent, over all sessions."""
        self.state = CacheState(settings)
        """What both parts share. It is another one after `reset`."""

    # -- for the engine

    def is_ready(self) -> bool:
        """Whether a session is open, and the manager knows all that is in use here."""
        link = self.state.link
        return link is not None and link.is_live

    @property
    def num_used_blocks(self) -> tuple[int, ...]:
        """Blocks in tables in each group; a shared one counts once."""
        return tuple(ledger.num_used for ledger in self.state.ledgers)

    @property
    def usage(self) -> float:
        """Share of blocks that are in tables, 0 to 1, in the group where it is largest: the one that will be exhausted first."""
        return max(ledger.num_used / (ledger.num_blocks - 1) for ledger in self.state.ledgers)

    @property
    def num_spare_blocks(self) -> tuple[int, ...]:
        """Blocks in the reserve of each group."""
        return tuple(map(len, self.state.reserves))

    @property
    def is_exhausted(self) -> bool:
        """Whether reserve and pool of a group are empty: the manager has reported so, and no sequence is giving blocks back."""
        state = self.state
        if any(not (state.forks_found_no_room and state.is_parent(sequence)) for sequence in state.ending):
            return False
        # Decoding needs no blocks of other groups.
        is_out = any(state.pool_is_empty[group] and not state.reserves[group] for group in self.settings.growing)
        return is_out or (bool(state.num_forks_to_come) and state.lacks_blocks_for_a_fork())

    @property
    def lacks_blocks_for_forks(self) -> bool:
        """Whether a fork may lack blocks for ever: like `is_exhausted`, but a fork needs blocks of every group."""
        return not self.state.ending and self.state.lacks_blocks_for_a_fork()

    @property
    def forks_hold_blocks(self) -> bool:
        """Whether sequences that have ended keep their blocks because the manager has no room for their forks. Only the end of the
        forks is sure to bring the blocks back."""
        state = self.state
        return state.forks_found_no_room and any(state.is_parent(sequence) for sequence in state.ending)

    @property
    def is_idle(self) -> bool:
        """Whether the manager has acknowledged that this worker holds and reserves nothing."""
        state = self.state
        return not (state.sequences or state.ending or any(state.reserves) or any(state.returning()))

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        """Make the tables cover `num_slots` positions with blocks of the reserve. False, without a change, if the reserve has too
        few. No step may use the sequence."""
        assert not sequence.in_step
        state, tables, num_computed = self.state, sequence.group_tables, sequence.num_computed_tokens
        counts = [table.num_missing(num_computed, num_slots) for table in tables]
        if not (any(counts) or self.settings.keeping_boundaries):
            return True  # as nearly always while a sequence decodes
        if any(count > len(reserve) for count, reserve in zip(counts, state.reserves, strict=True)):
            if not any(state.pool_is_empty):
                self.num_reserve_waits += 1
            return False
        for group, (table, reserve, count) in enumerate(zip(tables, state.reserves, counts, strict=True)):
            if num_useful := table.num_useful(num_computed, num_slots):
                # Forks go before what is only useful: a group of beams waits for them.
                num_for_forks = state.num_forks_to_come * self.settings.groups[group].fork_blocks(self.settings.sizes)
                count += max(0, min(num_useful, len(reserve) - count - num_for_forks))
            spare = [reserve.take() for _ in range(count)]
            state.ledgers[group].use(*(reserved.block for reserved in spare))
            table.advance(num_computed, num_slots, spare)
            if table.grows:
                sequence.num_entries = len(table.table)
        return True

    def chunk(self, sequence: CacheSequence, most: int) -> int:
        """Tokens of the next chunk of a prompt, `most` at most; 0: with a state, which is kept on a grid, `most` is too few."""
        return boundaries.chunk(sequence, most, self.settings)

    def fork(self, parent: CacheSequence, sequence_id: str, *, num_tokens: int | None = None) -> ForkedSequence | None:
        """Make a live sequence that goes on from where `parent`, which is live and in no step, has computed all its tokens, or all
        but one. It shares the parent's full blocks; of the others it gets the copies of the result, which the step launched next
        must make, whichever sequences it computes. Parent and fork may be freed at any time; they keep their blocks as long as
        these copies need them. The engine must free the fork if that step fails.

        `sequence_id`: of no other live sequence; the attempt is the parent's. `num_tokens`: how many of the parent's tokens it
        has, at least those that are computed; None: all. It may have as many in the end as the parent.

        None, without a change: the reserve has too few blocks, and is filled as `num_forks_to_come` of the parent says, which is 1
        from now on if it was 0. Or a sequence of that name, which an earlier stream had, has not given its blocks back yet.
        """
        return forks.fork(self.state, parent, sequence_id, num_tokens)

    def begin_step(self, sequences: Iterable[CacheSequence]) -> None:
        """A step that uses the blocks of these sequences starts. It makes the copies of all forks since the last one."""
        forks.begin_copies(self.state)
        for sequence in sequences:
            assert sequence.state is SequenceState.LIVE
            assert not sequence.in_step
            sequence.in_step = True

    def end_step(self, results: Iterable[Computed], now: float, *, num_added_later: int = 0) -> None:
        """Take the results of the step, which has ended. `num_added_later`: tokens that it has sampled as well, and that
        `add_token` adds."""
        num_sampled = num_added_later
        forks.end_copies(self.state)
        for sequence, num_computed_tokens, token in results:
            sequence.in_step = False
            self._advance(sequence, num_computed_tokens, now)
            if token is not None:
                num_sampled += 1
                sequence.tokens.append(token)
        self.state.rate.note(num_sampled, now)
        forks.settle(self.state)

    def add_token(self, sequence: CacheSequence, token_id: int) -> None:
        """Append the next token of a sequence, which the last step has sampled. `end_step` left it out because the sequence's forks
        had to be made without it."""
        assert not sequence.in_step
        sequence.tokens.append(token_id)

    def fail_step(self, sequences: Iterable[CacheSequence]) -> None:
        """The step failed: it has computed nothing, and the device no longer uses the blocks."""
        forks.end_copies(self.state, are_made=False)
        for sequence in sequences:
            sequence.in_step = False
        forks.settle(self.state)

    def _advance(self, sequence: CacheSequence, num_computed_tokens: int, now: float) -> None:
        state, size = self.state, self.settings.block_size
        num_before = sequence.num_computed_tokens
        sequence.progress_at = now
        naming.complete(state, sequence, num_computed_tokens)
        if num_before // size == num_computed_tokens // size and not sequence.has_encoder_news:
            return
        if state.report_due_at is None:
            state.report_due_at = now + self.settings.report_seconds
        state.is_urgent = state.is_urgent or parking.is_waited_for(state, sequence)

    def free(self, sequence: CacheSequence) -> None:
        """The engine is done with the sequence, in any state. Its blocks are freed when no step uses them."""
        if sequence.state in (SequenceState.ENDING, SequenceState.ENDED):
            return
        if sequence.state is SequenceState.PARKED:
            self.state.parked.remove(sequence)
        if sequence.state is SequenceState.LIVE:
            forks.drop_copies(self.state, sequence)
        if sequence.parent is not None or sequence.maybe_granted:
            sequence.state = SequenceState.ENDING
            self.state.ending.append(sequence)
            forks.settle(self.state)
        else:
            self.state.end(sequence)

    def preempt(self, sequence: CacheSequence) -> CacheSequence:
        """Free the blocks of a live sequence; returns its next round, in state WAITING.

        The next round can be allocated only after the Free of the old one is answered.
        """
        assert sequence.state is SequenceState.LIVE
        again = sequence.next_round()
        self.free(sequence)
        return again

    def take_events(self) -> list[events.Event]:
        """The events since the last call."""
        taken, self.state.events = self.state.events, []
        return taken

    # -- for the edge: sessions

    @property
    def session(self) -> int:
        """Number of the open session; 0 while there is none."""
        link = self.state.link
        return 0 if link is None else link.session

    def reset(self) -> None:
        """Forget all blocks. No step may be running and no stream open."""
        state = self.state
        for sequence in [*state.sequences.values(), *state.ending, *state.parked]:
            assert not sequence.in_step
            state.end(sequence)
        self.state = CacheState(self.settings)
        self.state.num_windows_named = state.num_windows_named
        self.state.num_windows_not_named = state.num_windows_not_named

    def on_registered(self, response: cache_pb2.RegisterResponse) -> None:
        """A session is open; unanswered calls of an earlier one are void."""
        if self.state.holds_anything and not response.report_wanted:
            self.state.give_up("the manager accepts no report of the blocks that this worker holds")
            return
        link = LinkState(response.session, response.session_key)
        self.state.begin_session(link, report_wanted=response.report_wanted)

    def keep_alive(self, load: common_pb2.WorkerLoad, *, draining: bool = False) -> cache_pb2.KeepAliveRequest | None:
        """The next heartbeat; None without a session. `draining`: new requests are refused."""
        link = self.state.link
        if link is None:
            return None
        request = cache_pb2.KeepAliveRequest(
            session=link.session,
            session_key=link.key,
            downlink_ack=link.applied_number,
            load=load,
            draining=draining,
            answer_ack=link.heard_heartbeat,
        )
        for group, (ledger, reserve) in enumerate(zip(self.state.ledgers, self.state.reserves, strict=True)):
            request.counts.add(
                group=group,
                tier=common_pb2.TIER_DEVICE,
                capacity=ledger.num_blocks - 1,
                held=ledger.num_used,
                reserved=len(reserve),
            )
        return request

    def on_keep_alive(self, session: int, response: cache_pb2.KeepAliveResponse) -> None:
        """A heartbeat of `session` was answered."""
        link = self.state.link
        if link is not None and link.session == session:
            link.heard_heartbeat = max(link.heard_heartbeat, response.number)
            self._guarded(lambda: replies.take_entries(self.state, link, response.downlink))

    # -- for the edge: calls

    def next_call(self, candidates: Callable[[], List[CacheSequence]], now: float) -> MutatingCall | None:
        """The next mutating call, if one is due and none is in flight.

        `candidates` returns the WAITING sequences that the engine would run now, in order.
        """
        link = self.state.link
        if link is None or link.in_flight is not None or now < link.retry_at:
            return None
        link.in_flight = next_call.next_call(self.state, link, candidates, now)
        self.num_calls += link.in_flight is not None
        return link.in_flight

    def next_call_at(self, now: float) -> float | None:
        """When to call `next_call` again if nothing else happens; None: only after an event."""
        link = self.state.link
        if link is None or link.in_flight is not None:
            return None
        return next_call.next_call_at(self.state, link, now)

    def on_reply(self, call: MutatingCall, response: replies.Response, now: float) -> None:
        """The call was executed. A reply to a call that was given up is dropped."""
        link = self.state.link
        if link is not None and link.in_flight is call:
            link.succeeded()
            self._guarded(lambda: replies.take_reply(self.state, link, call, response, now))

    def on_refused(self, call: MutatingCall, why: str) -> None:
        """The call was refused, and would be refused again with the same state. No effect if the call was given up."""
        link = self.state.link
        if link is None or link.in_flight is not call:
            return
        if call.is_report:
            self.state.give_up(f"the manager refuses the report: {why}")
        else:
            self.state.lose_session(f"the manager refused a call: {why}")

    def on_failure(self, call: MutatingCall, reason: str, now: float) -> None:
        """The call was not answered, or refused as a whole. `reason`: its ErrorInfo.reason, empty for the transport's own errors.

        Its state is sent again under a larger call_no. If it was executed all the same, the next reply shows its effects.
        """
        link = self.state.link
        if link is None or link.in_flight is not call:
            return
        report = link.report
        if report is not None and report.is_live and call.is_report and reason == "RECOVERING":
            # Others report their caches: this one can wait, and other calls go on.
            link.in_flight, report.retry_at = None, now + BACKOFF_MOST_SECONDS
            return
        link.failed(now)
        if reason in SESSION_OVER:
            self.state.lose_session(SESSION_OVER[reason])
            return
        if reason == "STALE_CALL":
            link.num_stale_calls += 1
            if link.num_stale_calls == MAX_STALE_CALLS:
                self.state.lose_session(
                    f"{MAX_STALE_CALLS} calls in a row were answered STALE_CALL: a larger call_no was executed before"
                )
                return
        self.state.is_urgent = True
        for stated in call.stated:
            if stated.sequence.state is SequenceState.ALLOCATING:
                stated.sequence.state = SequenceState.WAITING

    def _guarded(self, apply: Callable[[], None]) -> None:
        try:
            apply()
        except DisagreementError as error:
            self.state.lose_session(f"the manager and this worker disagree: {error}")
