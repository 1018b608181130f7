"""The engine's side of the cache: block tables of live sequences, the reserve, and what to tell the manager next.

Sans I/O and without a clock. The engine calls the methods of the first part between steps; whoever does the I/O asks `next_call`,
sends it, and hands back `on_reply` or `on_failure`. One owner, one thread. Nothing here ever waits: a decode that needs a block
takes it from the reserve or goes without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from kvpool.v1 import cache_pb2, common_pb2

from . import events, next_call, parking, replies
from .ledger import Content, DisagreementError
from .link_state import MAX_STALE_CALLS, SESSION_OVER, Call, LinkState
from .sequence import CacheSequence, SequenceState, pack_tokens
from .state import CacheSettings, CacheState


class Computed(NamedTuple):
    """What a step has done for one sequence."""

    sequence: CacheSequence
    num_computed_tokens: int
    """Tokens from position 0 whose KV is complete now."""
    token: int | None
    """The token sampled, if one was."""


class EngineCache:
    """All of a worker's sequences and blocks, and the link that keeps the manager informed of them."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.num_reserve_waits = 0
        """How often a decode went without a block although the pool had some: it waited for an RPC."""
        self.num_calls = 0
        """Mutating calls sent, over all sessions."""
        self._state = CacheState(settings)

    # -- for the engine

    def is_ready(self) -> bool:
        """Whether a session is open and what is held here is known in it."""
        return self._state.open_link() is not None

    @property
    def num_used_blocks(self) -> int:
        """Blocks that tables name, shared ones once."""
        return self._state.ledger.num_used

    @property
    def num_spare_blocks(self) -> int:
        """Blocks in the reserve."""
        return len(self._state.reserve)

    @property
    def is_exhausted(self) -> bool:
        """Whether the reserve is empty because the pool is: the manager has said so, and nothing is on its way back."""
        state = self._state
        return state.pool_is_empty and not state.reserve and not state.ending

    @property
    def is_idle(self) -> bool:
        """Whether the manager has acknowledged that nothing is held or reserved here."""
        state = self._state
        return not (state.sequences or state.ending or state.reserve or state.reserve.returning)

    def extend(self, sequence: CacheSequence, num_slots: int) -> bool:
        """Make the table cover `num_slots` positions out of the reserve. False, and nothing changed, if it is too small."""
        state = self._state
        num_missing = -(-num_slots // self.settings.block_size) - len(sequence.table)
        if num_missing > len(state.reserve):
            if not state.pool_is_empty:
                self.num_reserve_waits += 1
            return False
        for _ in range(num_missing):
            block, generation = state.reserve.take()
            state.ledger.use(block)
            sequence.table.append(block)
            sequence.generations.append(generation)
        return True

    def begin_step(self, sequences: Iterable[CacheSequence]) -> None:
        """A step that names the blocks of these sequences is being launched."""
        for sequence in sequences:
            assert sequence.state is SequenceState.LIVE
            assert not sequence.in_step
            sequence.in_step = True

    def end_step(self, results: Iterable[Computed], now: float) -> None:
        """The step has completed."""
        num_sampled = 0
        for sequence, num_computed_tokens, token in results:
            sequence.in_step = False
            self._advance(sequence, num_computed_tokens, now)
            if token is not None:
                num_sampled += 1
                sequence.tokens.append(token)
        self._state.rate.note(num_sampled, now)

    def fail_step(self, sequences: Iterable[CacheSequence]) -> None:
        """The step broke off: nothing is known to be computed, and no device work names the blocks any more."""
        for sequence in sequences:
            sequence.in_step = False

    def _advance(self, sequence: CacheSequence, num_computed_tokens: int, now: float) -> None:
        state, size = self._state, self.settings.block_size
        first, last = sequence.num_computed_tokens // size, num_computed_tokens // size
        sequence.num_computed_tokens = num_computed_tokens
        if first == last:
            return
        for index in range(first, last):
            parent = state.ledger.content(sequence.table[index - 1]) if index else None
            tokens = pack_tokens(sequence.tokens[index * size : (index + 1) * size])
            state.ledger.complete(sequence.table[index], Content(parent, sequence.root, tokens))
        if state.report_due_at is None:
            state.report_due_at = now + self.settings.report_seconds
        state.is_urgent = state.is_urgent or parking.is_waited_for(state, sequence)

    def free(self, sequence: CacheSequence) -> None:
        """The engine is done with the sequence, in whatever state it is. Its blocks go back when no step names them."""
        if sequence.state in (SequenceState.ENDING, SequenceState.ENDED):
            return
        if sequence.state is SequenceState.PARKED:
            self._state.parked.remove(sequence)
        if sequence.maybe_granted:
            sequence.state = SequenceState.ENDING
            self._state.ending.append(sequence)
        else:
            self._state.end(sequence)

    def preempt(self, sequence: CacheSequence) -> CacheSequence:
        """Take the blocks of a live sequence back; returns the same request in its next round, waiting to be allocated.

        The old round lives on here until its Free is answered; only then may the new one be allocated.
        """
        assert sequence.state is SequenceState.LIVE
        again = sequence.next_round()
        self.free(sequence)
        return again

    def take_events(self) -> list[events.Event]:
        """What has happened since the last call."""
        taken, self._state.events = self._state.events, []
        return taken

    # -- for the edge: sessions

    @property
    def session(self) -> int:
        """Number of the open session; 0 while there is none."""
        link = self._state.link
        return 0 if link is None else link.session

    @property
    def holds_state(self) -> bool:
        """Whether the next session must begin with a report."""
        return self._state.holds_anything

    @property
    def is_given_up(self) -> bool:
        """Whether what is held here must be forgotten: the engine has to end its streams and steps, then `reset`."""
        return self._state.is_given_up

    def lose(self, why: str) -> None:
        """The session is over. Sequences live on and decode out of the reserve; the next session begins with a report."""
        self._state.lose_session(why)

    def give_up(self, why: str, *, is_defect: bool = True) -> None:
        """What is held here cannot be made known to the manager; the engine is told by an event."""
        self._state.give_up(why, is_defect=is_defect)

    def reset(self) -> None:
        """Forget all blocks. Only when no step is running and no stream lives."""
        state = self._state
        for sequence in [*state.sequences.values(), *state.ending, *state.parked]:
            assert not sequence.in_step
            state.end(sequence)
        self._state = CacheState(self.settings)

    def on_registered(self, response: cache_pb2.RegisterResponse) -> None:
        """A session is open; whatever was unanswered before belongs to the past."""
        if self._state.holds_anything and not response.report_wanted:
            self.give_up("the manager takes no report of what this worker holds")
            return
        link = LinkState(response.session, response.session_key)
        self._state.begin_session(link, report_wanted=response.report_wanted)

    def keep_alive(self, load: common_pb2.WorkerLoad, *, draining: bool = False) -> cache_pb2.KeepAliveRequest | None:
        """The next heartbeat; None without a session. `draining`: no further requests are taken."""
        link = self._state.link
        if link is None:
            return None
        request = cache_pb2.KeepAliveRequest(
            session=link.session,
            session_key=link.key,
            downlink_ack=link.applied_number,
            load=load,
            draining=draining,
        )
        request.counts.add(
            group=0,
            tier=common_pb2.TIER_DEVICE,
            capacity=self.settings.num_blocks - 1,
            held=self._state.ledger.num_used,
            reserved=len(self._state.reserve),
        )
        return request

    def on_keep_alive(self, session: int, response: cache_pb2.KeepAliveResponse) -> None:
        """A heartbeat of `session` was answered."""
        link = self._state.link
        if link is not None and link.session == session:
            self._guarded(lambda: replies.take_entries(self._state, link, response.downlink))

    # -- for the edge: calls

    def next_call(self, candidates: Callable[[], List[CacheSequence]], now: float) -> Call | None:
        """The next mutating call, if there is something to say and none is in flight.

        `candidates` names the WAITING sequences that the engine would run now, in order.
        """
        link = self._state.link
        if link is None or link.in_flight is not None or now < link.retry_at:
            return None
        link.in_flight = next_call.next_call(self._state, link, candidates, now)
        self.num_calls += link.in_flight is not None
        return link.in_flight

    def next_call_at(self, now: float) -> float | None:
        """When to ask `next_call` again if nothing else happens; None: only when something does."""
        link = self._state.link
        if link is None or link.in_flight is not None:
            return None
        return next_call.next_call_at(self._state, link, now)

    def on_reply(self, call: Call, response: replies.Response, now: float) -> None:
        """The call was executed. A reply to a call given up before is dropped whole."""
        link = self._state.link
        if link is not None and link.in_flight is call:
            link.succeeded()
            self._guarded(lambda: replies.take_reply(self._state, link, call, response, now))

    def on_refused(self, call: Call, why: str) -> None:
        """The call was refused in a way that the same state would be refused again. A call given up before is of the past."""
        link = self._state.link
        if link is None or link.in_flight is not call:
            return
        if isinstance(call.request, cache_pb2.ReportRequest):
            self.give_up(f"the manager refuses the report: {why}")
        else:
            self.lose(f"the manager refused a call: {why}")

    def on_failure(self, call: Call, reason: str, now: float) -> None:
        """The call was not answered or refused whole; `reason` is its ErrorInfo.reason, empty for the transport's own errors.

        Its state goes out again under a larger call_no. What it may have done meanwhile comes to light with the next reply.
        """
        link = self._state.link
        if link is None or link.in_flight is not call:
            return
        link.failed(now)
        if reason in SESSION_OVER:
            self.lose(SESSION_OVER[reason])
            return
        if reason == "STALE_CALL":
            link.num_stale_calls += 1
            if link.num_stale_calls == MAX_STALE_CALLS:
                self.lose(
                    f"{MAX_STALE_CALLS} calls in a row were answered STALE_CALL: a larger call_no was executed before"
                )
                return
        self._state.is_urgent = True
        for stated in call.stated:
            if stated.sequence.state is SequenceState.ALLOCATING:
                stated.sequence.state = SequenceState.WAITING

    def _guarded(self, take_in: Callable[[], None]) -> None:
        try:
            take_in()
        except DisagreementError as error:
            self.lose(f"the manager and this worker disagree: {error}")
