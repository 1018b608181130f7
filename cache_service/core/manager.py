"""The cache manager: sessions of workers over one prefix tree. Synchronous, no I/O, no clock; one owner calls it.

Everything that can be refused is refused by a `Refusal` before anything has changed. Mutating calls of a worker pass `_begin`,
which executes a call only if its number is larger than that of any executed before in the session: so lost replies and repeated or
reordered messages do no harm.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as List
from typing import NoReturn

from . import allocation, forks, updates
from .budget import Account, Budget
from .candidates import Candidates, ServedModel
from .closest_prompt import THOROUGH, Bounds
from .contents import Contents
from .copies import Holder
from .description import BlockDescription, describe_blocks
from .downlink import Downlink
from .evictions import EvictionMemory
from .explanation import PromptExplanation, Search, explain
from .fencing import Fencing
from .groups import make_groups
from .hashing import HashFunction, xxh64
from .incarnations import Incarnations
from .integrity import Audit, OnlineAudit, World, audit
from .messages import (
    TOKEN_BYTES,
    AllocateItem,
    AllocateOutcome,
    AppendItem,
    AppendOutcome,
    Drain,
    ForkItem,
    Grant,
    Granted,
    Limits,
    Registered,
    Registration,
    Reply,
    ReportPart,
    Root,
    SequenceUpdate,
    Uplink,
    WorkerLoad,
)
from .prefix_tree import PrefixTree
from .recovery import Recovery
from .refusal import Reason, Refusal, bad_field
from .report_turns import ReportTurns
from .restored import Case
from .routing import RoutedWorker, route
from .salts import SaltNumbers
from .session import Session, SessionEnd
from .session_key import NO_KEY, SessionKey

EPOCH_SHIFT = 40
"""Sessions and generations are epoch << EPOCH_SHIFT | counter."""

SWEEP_SLICE_NODES = 2048
"""Sequences, blocks and nodes of retired sessions that one slice of the sweep visits, plus at most one sequence's path."""

REPORT_FIRST_SECONDS = 2.0
"""A worker that has registered has so long to report what it has in use before the caches of others. And a cache waits for such
workers no longer than that in all: some worker may register again and again."""

_OUT_OF_BLOCKS = frozenset({Reason.NO_BLOCKS, Reason.TOO_MANY_BLOCKS, Reason.TOO_MANY_TOKENS})
"""No blocks are left for the item: those after it in the batch wait too, or it could be overtaken for ever."""


class CacheManager:
    """Owns every decision about KV blocks, for all workers.

    `epoch` is this life of the manager, larger than any before; times are seconds of one monotonic clock. `session_start`, below
    2**39, is where the numbers of sessions begin within the epoch. A random one separates two lives that had the same epoch because
    the disk lost it: otherwise a worker's session of the one life could be another worker's session of the other.

    `explain_evictions`: how many evictions `explain` remembers. `explain_across_salts`: whether it looks at what other salts hold.
    """

    def __init__(
        self,
        epoch: int,
        *,
        session_start: int = 0,
        lease_seconds: float = 6.0,
        tick_seconds: float = 0.5,
        limits: Limits | None = None,
        hash_function: HashFunction = xxh64,
        explain_evictions: int = 0,
        explain_across_salts: bool = False,
    ) -> None:
        self.epoch = epoch
        self.lease_seconds = lease_seconds
        self.limits = limits or Limits()
        self._tick_seconds = tick_seconds
        self._hash_function = hash_function
        self._tree = PrefixTree(hash_function)
        self._attempts = Fencing()
        self._evictions = EvictionMemory(explain_evictions) if explain_evictions else None
        self._explain_across_salts = explain_across_salts
        self.budget = Budget(self.limits.max_total_blocks, self.limits.max_total_tokens)
        """Blocks and tokens of all live sessions together, and their limits."""
        self._sessions: dict[int, Session] = {}
        self._workers: dict[str, Session] = {}
        self._candidates = Candidates(hash_function)
        self._touched = self._candidates.touched
        self._num_serving: Counter[str] = Counter()
        """Live sessions of workers that serve text, by model, whether or not they take new prompts now."""
        max_known = max(self.limits.max_known_incarnations, self.limits.max_workers)
        self._incarnations = Incarnations(lease_seconds, max_known, self.limits.max_numbers_skipped)
        self.reconciled: Counter[Case] = Counter()
        """Blocks and sequences of complete reports, by case."""
        self.num_reports = 0
        """Reports that are complete."""
        self.ended: Counter[SessionEnd] = Counter()
        """Sessions that have ended, by reason."""
        self._recoveries: dict[int, Recovery] = {}
        """Reports that are not complete yet, by session."""
        self._report_turns = ReportTurns(self.limits.max_reports_at_once, lease_seconds)
        self._completed: deque[Recovery] = deque()
        """Reports that are complete, and not discarded yet."""
        self._retired: deque[Session] = deque()
        self._sweep_slot = self._sweep_position = 0
        """The next slot and first block to sweep in the first of the retired sessions."""
        self.salts = SaltNumbers()
        self.contents: Contents | None = None
        """The journal of contents, while somebody follows it."""
        self._last_event = self._last_node = 0
        """The last numbers of events and nodes that ended journals may have used; the next journal continues after them."""
        self.last_generation = epoch << EPOCH_SHIFT
        """The largest generation given so far."""
        self._last_session = self._sessions_from = (epoch << EPOCH_SHIFT) + session_start
        self._last_tick: float | None = None
        self._now = 0.0
        """The time given by the last call that had one, in seconds."""

    # -- sessions

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Live sessions, oldest first."""
        return tuple(self._sessions.values())

    @property
    def num_prefix_nodes(self) -> int:
        """Nodes of the prefix tree over all workers."""
        return self._tree.num_nodes

    @property
    def num_unswept_sessions(self) -> int:
        """Sessions that have ended and still have entries in the tree, which `sweep` removes."""
        return len(self._retired)

    def raise_epoch(self, epoch: int) -> None:
        """Continue under a larger epoch, because a worker has seen one as large as ours. The caller has made it durable."""
        assert epoch > self.epoch
        self._last_session += (epoch - self.epoch) << EPOCH_SHIFT
        self._sessions_from = self._last_session
        self.epoch = epoch
        self.last_generation = epoch << EPOCH_SHIFT

    def register(self, registration: Registration, now: float, key: SessionKey = NO_KEY) -> Registered:
        """Begin a session and fence the worker's earlier one. A worker that holds state must report it before it is served.

        `key` is the session's secret, new and random where strangers can reach the caller: every call of the session is refused
        unless it states the same.

        Raises Refusal: BAD_FIELD, UNSUPPORTED, STALE_INCARNATION, STALE_REGISTER, WORKER_ELSEWHERE, TOO_MANY_WORKERS. The servicer
        adds FOREIGN_EPOCH.
        """
        self.require_acceptable(registration, now)
        self._note_time(now)
        worker_id = registration.worker_id
        earlier = self._workers.get(worker_id)
        if earlier is not None:
            self._retire(earlier, SessionEnd.FENCED)
        self._incarnations.remember(registration, self._workers)
        self._last_session += 1
        session = self._new_session(registration, now + self.lease_seconds, key)
        is_same_process = earlier is not None and earlier.registration.incarnation == registration.incarnation
        if earlier is not None and earlier.drain is not None and is_same_process:
            # The order may not have reached it.
            session.draining, session.drain = True, earlier.drain
            session.downlink.push(earlier.drain)
        session.registered_at = now
        if registration.holds_state:
            session.recovering = True
            self._recoveries[session.number] = Recovery(session, self.last_generation)
        elif self.contents is not None:
            self.contents.open(session)
        session.follows_unheard = earlier is not None and not earlier.has_called
        self._sessions[session.number] = self._workers[worker_id] = session
        if registration.address:
            self._num_serving[registration.model_fingerprint] += 1
        self._touched[session] = None
        return Registered(self.epoch, session.number)

    def _new_session(self, registration: Registration, lease_end: float, key: SessionKey) -> Session:
        account = Account(self.budget, registration.layout.block_size)
        evicted = None if self._evictions is None else self._evictions.names
        groups = make_groups(registration, self._tree, account, evicted)
        downlink = Downlink(self.limits.max_downlink_entries, self.limits.max_blocks_per_reply)
        return Session(
            self._last_session,
            registration,
            groups,
            account,
            downlink,
            lease_end,
            self.limits,
            key,
        )

    def require_acceptable(self, registration: Registration, now: float) -> None:
        """Refuse what `register` would refuse now. Changes nothing. Raises Refusal as `register` does."""
        self._check_registration(registration)
        earlier = self._workers.get(registration.worker_id)
        self._incarnations.require_turn(registration, earlier, now)
        if earlier is None and len(self._workers) >= self.limits.max_workers:
            raise Refusal(
                Reason.TOO_MANY_WORKERS, f"{len(self._workers)} workers are registered, the limit: deregister one first"
            )

    def _check_registration(self, registration: Registration) -> None:
        limits = self.limits
        for name, text, least, most in (
            ("worker_id", registration.worker_id, 1, limits.max_id_bytes),
            ("model_fingerprint", registration.model_fingerprint, 1, limits.max_id_bytes),
            ("address", registration.address, 0, limits.max_name_bytes),
            ("model_name", registration.model_name, 0, limits.max_name_bytes),
            ("engine", registration.engine, 0, limits.max_name_bytes),
        ):
            if not least <= len(text.encode()) <= most:
                raise bad_field(name, f"needed {least} to {most} bytes, got {len(text.encode())}")
        size = registration.layout.block_size
        if size < 1 or size & (size - 1) or size > limits.max_block_size:
            raise bad_field(
                "kv_cache_config.block_size",
                f"needed a power of two from 1 to {limits.max_block_size}, got {size}",
            )
        groups = registration.layout.groups
        if not 1 <= len(groups) <= limits.max_groups:
            raise bad_field("kv_cache_config.groups", f"needed 1 to {limits.max_groups} groups, got {len(groups)}")
        for index, group in enumerate(groups):
            if not 2 <= group.num_blocks <= limits.max_blocks_per_pool:
                raise bad_field(
                    f"kv_cache_config.pools[{index}]",
                    f"needed 2 to {limits.max_blocks_per_pool} blocks (block 0 is the null block), got {group.num_blocks}",
                )
            group.check(f"kv_cache_config.groups[{index}]", groups, size, limits)
        for name, content, most in (
            ("process_key", registration.process_key, limits.max_process_key_bytes),
            ("predecessor_key", registration.predecessor_key, limits.max_process_key_bytes),
            ("facts_digest", registration.facts_digest, limits.max_digest_bytes),
        ):
            if len(content) > most:
                raise bad_field(name, f"at most {most} bytes, got {len(content)}")

    def has_numbered(self, session: int) -> bool:
        """Whether this life of the manager has given a session that number, under its present epoch. Another life with the same
        epoch began at another number."""
        return self._sessions_from < session <= self._last_session

    def keep_alive(
        self,
        session_number: int,
        downlink_ack: int,
        load: WorkerLoad,
        now: float,
        *,
        draining: bool = False,
        key: SessionKey = NO_KEY,
        answer_ack: int | None = None,
    ) -> Reply:
        """Renew the lease, record the load, refill the reserve as last wished, and return what is on the downlink.

        The lease is renewed only if `answer_ack` acknowledges an answer for the first time, or is None: a worker that hears no
        answer cannot work. A late heartbeat may be from before the draining began: only the end of the session ends it.

        Raises Refusal: STALE_SESSION, WRONG_KEY, BAD_FIELD.
        """
        session = self._own_session(session_number, key)
        _check_acknowledgement(session, downlink_ack)
        if answer_ack is not None and answer_ack > session.num_heartbeats:
            raise bad_field("answer_ack", f"at most {session.num_heartbeats}, the last answer sent, got {answer_ack}")
        self._note_time(now)
        session.num_heartbeats += 1
        if answer_ack is None or answer_ack > session.heard_heartbeat:
            session.lease_end = now + self.lease_seconds
            session.heard_heartbeat = max(session.heard_heartbeat, answer_ack or 0)
        session.load = load
        self._touched[session] = None
        session.draining = session.draining or draining
        session.downlink.acknowledge(downlink_ack)
        if not session.recovering:
            self._top_up(session)
        return self._reply(session)._replace(heartbeat_no=session.num_heartbeats)

    def deregister(self, session_number: int, key: SessionKey = NO_KEY) -> Session | None:
        """End a session because its worker leaves, and return it; None if it has ended already.

        Raises Refusal: WRONG_KEY.
        """
        if session_number not in self._sessions:
            return None
        session = self._own_session(session_number, key)
        self._retire(session, SessionEnd.DEREGISTERED)
        return session

    def end_session(self, session_number: int, why: SessionEnd) -> None:
        """End a live session because the manager says so."""
        self._retire(self._sessions[session_number], why)

    def drain(self, worker_id: str, grace_seconds: float | None = None) -> Session:
        """Exclude the worker from routes and order it to leave. Does nothing if it is draining already.

        Raises Refusal: UNKNOWN_WORKER, BAD_FIELD.
        """
        longest = self.limits.max_grace_seconds
        if grace_seconds is not None and not 0 <= grace_seconds <= longest:
            raise bad_field("grace_ms", f"at most {longest:g} s, got {grace_seconds:g} s")
        session = self.worker(worker_id)
        if not session.draining:
            session.draining = True
            self._touched[session] = None
            session.drain = Drain(grace_seconds)
            session.downlink.push(session.drain)
        return session

    def tick(self, now: float) -> list[Session]:
        """Fence the sessions whose lease has run out and return them. Call it every `tick_seconds`.

        A gap between two ticks that is longer than planned is time in which this process did not run, not its workers, and
        KeepAlives may be waiting to be read: it is added to every lease.
        """
        self._note_time(now)
        gap = 0.0 if self._last_tick is None else max(0.0, now - self._last_tick - 2 * self._tick_seconds)
        self._last_tick = now
        if gap:
            # Never beyond a whole lease: a KeepAlive may have been read between the gap and this tick.
            longest = now + self.lease_seconds
            for session in self._sessions.values():
                session.lease_end = min(session.lease_end + gap, longest)
        expired = [session for session in self._sessions.values() if session.lease_end <= now]
        for session in expired:
            self._retire(session, SessionEnd.EXPIRED)
        return expired

    def _note_time(self, now: float) -> None:
        """Keep the time for evictions and reports: the calls that evict, and parts of reports, are not given one."""
        self._now = now
        if self._evictions is not None:
            self._evictions.set_time(now)

    def _own_session(self, number: int, key: SessionKey) -> Session:
        """The live session of a call. The key is checked before anything else of the session is read or changed."""
        session = self._sessions.get(number)
        if session is None:
            raise Refusal(
                Reason.STALE_SESSION,
                f"session {number:#x} is not live: it was fenced, its lease ran out, or the manager restarted; end the streams, "
                "complete running steps and register again",
            )
        if not session.key.matches(key):
            raise Refusal(
                Reason.WRONG_KEY,
                f"the call does not carry the key of session {number:#x}: state the session_key that Register answered; a worker "
                "that has none registers",
            )
        return session

    def report(self, uplink: Uplink, part: ReportPart) -> tuple[Session, Reply]:
        """Apply the next part of a worker's report; after the one that is `live` the worker is served again.

        Raises Refusal: STALE_SESSION, WRONG_KEY, STALE_CALL, GAP (the position is the number of the part needed), RECOVERING (the
        contents of too many other workers are being taken in, or the pool must grow by much: send the part again), BAD_REPORT,
        TOO_MANY_BLOCKS, TOO_MANY_TOKENS (the session has ended).
        """
        session = self._begin(uplink, 0, reporting=True)
        recovery = self._recoveries.get(session.number)
        num_parts = session.num_report_parts if recovery is None else recovery.num_parts
        if part.part < num_parts:
            return session, self._reply(session)
        if recovery is None or part.part > num_parts:
            raise Refusal(
                Reason.GAP,
                f"part {part.part} of the report was sent, part {num_parts} is needed"
                if recovery is not None
                else f"part {part.part} was sent, but the report is complete",
                position=num_parts,
            )
        if part.contents and self._must_wait(session):
            raise Refusal(
                Reason.RECOVERING,
                f"other workers report what they have in use, which comes first: send part {num_parts} again",
            )
        if part.contents and not self._report_turns.ask(session.number, self._now):
            raise Refusal(
                Reason.RECOVERING,
                f"the contents of {self.limits.max_reports_at_once} other workers are being taken in: send part {num_parts} again",
            )
        try:
            recovery.apply(self._tree, self._attempts, part, self.limits)
        except Refusal as refusal:
            if refusal.reason is not Reason.RECOVERING:
                is_wrong = refusal.reason is Reason.BAD_REPORT
                self._retire(session, SessionEnd.BAD_REPORT if is_wrong else SessionEnd.OVER_BUDGET)
            raise refusal.with_traceback(None) from None
        if session.recovering and (part.live or part.last):
            session.recovering = False
            session.served_at = self._now
            if self.contents is not None:
                self.contents.open(session)
        if part.last:
            self._report_turns.end(session.number)
            session.num_report_parts = recovery.num_parts
            self.reconciled.update(recovery.cases)
            self._completed.append(self._recoveries.pop(session.number))
            self.num_reports += 1
        return session, self._reply(session)

    def _must_wait(self, session: Session) -> bool:
        """Whether the cache of a served worker waits: others registered a moment ago and have yet to report what they have in use,
        for which their streams wait."""
        if session.recovering or self._now - session.served_at >= REPORT_FIRST_SECONDS:
            return False
        coming = (self._sessions[number] for number in self._recoveries)
        return any(one.recovering and self._now - one.registered_at < REPORT_FIRST_SECONDS for one in coming)

    def _retire(self, session: Session, why: SessionEnd) -> None:
        """End a session in O(1): look-ups ignore its pool from now on; `sweep` removes its entries from the tree."""
        self.ended[why] += 1
        if self.contents is not None:
            self.contents.close(session)
        session.retire()
        self._candidates.drop(session)
        fingerprint = session.registration.model_fingerprint
        if session.registration.address:
            self._num_serving[fingerprint] -= 1
            if not self._num_serving[fingerprint]:
                del self._num_serving[fingerprint]
        self._recoveries.pop(session.number, None)
        self._report_turns.end(session.number)
        del self._sessions[session.number]
        del self._workers[session.worker_id]
        self._incarnations.on_end(session)
        self._retired.append(session)

    def sweep(self) -> bool:
        """Remove one slice of the tree entries of retired sessions, or of complete reports, and list one of what such a report has
        made a hit; returns whether more is left."""
        if self.contents is not None and not self.contents.is_complete:
            return self.contents.list_some(SWEEP_SLICE_NODES) or bool(self._completed or self._retired)
        if self._completed:
            if not self._completed[0].discard(SWEEP_SLICE_NODES):
                self._completed.popleft()
            return bool(self._completed or self._retired)
        budget = SWEEP_SLICE_NODES
        while self._retired and budget > 0:
            budget = self._sweep_first(budget)
        return bool(self._retired)

    def _sweep_first(self, budget: int) -> int:
        """Remove entries of one pool of the first retired session; returns what is left of the budget, 0 if some of the pool is.

        So one slice sweeps many sessions that hold nothing: somebody may begin and end them faster than slices come.
        """
        session = self._retired[0]
        budget -= self._tree.prune_condemned(budget)
        while session.sequences and budget > 0:
            sequence = next(iter(session.sequences.values()))
            budget -= 1 + len(sequence.nodes)
            updates.leave(self._tree, self._attempts, session, sequence)
        if session.sequences:
            return 0
        pool, begin = session.pools[self._sweep_slot], self._sweep_position
        self._sweep_position = pool.sweep(begin, budget)
        if self._sweep_position < pool.num_blocks or self._tree.has_condemned:
            return 0
        self._sweep_position = 0
        self._sweep_slot += 1
        if self._sweep_slot == len(session.pools):
            self._sweep_slot = 0
            session.holder.pools = ()
            self._retired.popleft()
        return budget - max(1, pool.num_known - begin)

    # -- following what the cache holds

    def follow_contents(self, capacity: int) -> Contents:
        """The journal of contents, begun if there is none; it keeps `capacity` events. What is there already is listed by
        `Contents.list_some`."""
        if self.contents is None:
            seen = [session for session in self._sessions.values() if not session.recovering]
            self.contents = Contents(
                capacity, seen, last_number=self._last_event, last_node=self._last_node, salts=self.salts
            )
            self._tree.journal = self.contents
        return self.contents

    def end_contents(self) -> None:
        """Nobody follows any more. Idempotent."""
        if self.contents is not None:
            # The next journal's numbers begin after one that nobody has seen: who knows an event of this one knows too little.
            self._last_event, self._last_node = self.contents.last_number + 1, self.contents.last_node
            self.contents = self._tree.journal = None

    # -- the link

    def _begin(self, uplink: Uplink, num_items: int, *, reporting: bool = False) -> Session:
        """Accept a mutating call, or refuse it whole, having done nothing."""
        session = self._own_session(uplink.session, uplink.key)
        if session.recovering and not reporting:
            raise Refusal(
                Reason.RECOVERING,
                f"worker {session.worker_id!r} has registered with state: its report must be complete first",
            )
        if num_items > self.limits.max_items_per_call:
            raise bad_field(
                "items",
                f"at most {self.limits.max_items_per_call} per call, got {num_items}: send several calls",
            )
        if uplink.call_no <= session.last_call_no:
            raise Refusal(
                Reason.STALE_CALL,
                f"call {uplink.call_no} was overtaken by call {session.last_call_no}: send the state again under a larger call_no",
            )
        most = session.last_call_no + self.limits.max_numbers_skipped
        if uplink.call_no > most:
            raise bad_field(
                "uplink.call_no",
                f"at most {most}, which is {self.limits.max_numbers_skipped} above the last call executed, got {uplink.call_no}: "
                "count up by one",
            )
        _check_acknowledgement(session, uplink.downlink_ack)
        wishes, returned = uplink.reserve_wishes, uplink.returned
        if len(wishes) > len(session.pools) or len(returned) > len(session.pools):
            session.require_groups(max(len(wishes), len(returned)), "uplink")
        session.last_call_no = uplink.call_no
        session.num_calls += 1
        self._touched[session] = None
        session.downlink.acknowledge(uplink.downlink_ack)
        for group, wish in enumerate(wishes):
            if wish is not None and wish != session.reserve_wishes[group]:
                most = min(session.pools[group].capacity, self.limits.max_reserve_blocks)
                session.reserve_wishes[group] = min(wish, most)
        for group, blocks in enumerate(returned):
            for block, generation in blocks:
                session.pools[group].unreserve(block, generation)
        return session

    def _stamp(self) -> int:
        """A generation for the grants of one call: larger than any before."""
        self.last_generation += 1
        return self.last_generation

    def _num_to_grant(self, session: Session, group: int) -> int:
        """Blocks that the reserve of a group lacks and that can be granted at once. Blocks of entries that are not acknowledged are
        reserved already."""
        pool = session.pools[group]
        num_lacking = session.reserve_wishes[group] - pool.num_reserved
        if num_lacking <= 0 or session.downlink.is_full:
            return 0
        return min(num_lacking, pool.num_available, self.limits.max_blocks_per_grant)

    def _top_up(self, session: Session, generation: int | None = None) -> None:
        """Grant the reserve what it lacks, as much as one reply may have: the rest follows with later ones. `generation`: that of
        the call; None: a new one, if anything is granted."""
        for group, pool in enumerate(session.pools):
            count = self._num_to_grant(session, group)
            if count > 0:
                if generation is None:
                    generation = self._stamp()
                if self._evictions is not None:
                    self._evictions.begin(session.holder.signatures[0], None, None)
                session.downlink.push(Grant(tuple(pool.take_reserved(count, generation)), generation, group))

    def _reply(self, session: Session) -> Reply:
        return Reply(session.downlink.pending(), session.counts())

    # -- sequences

    def allocate(self, uplink: Uplink, items: List[AllocateItem]) -> tuple[list[AllocateOutcome], Reply]:
        """Refill the reserve, then grant block tables in order. The batch ends at the first item that finds no blocks, or whose
        table fills the answer.

        Raises Refusal for the call as a whole: STALE_SESSION (also if the tables of live sequences exceed one answer: the session
        has ended), WRONG_KEY, STALE_CALL, RECOVERING, BAD_FIELD (too many items, a number out of bounds).
        """
        session = self._begin(uplink, len(items))
        generation = self._stamp()
        self._top_up(session, generation)
        outcomes: list[AllocateOutcome] = []
        full = False
        num_blocks, most_blocks = 0, self.limits.max_blocks_per_reply
        for item in items:
            # A live sequence needs no blocks and gets its table in any case: the worker may have lost the first answer, and would
            # never name, nor free, blocks that it does not know.
            is_large = num_blocks >= most_blocks
            if full or is_large:
                if (item.key.sequence_id, item.key.attempt) not in session.sequences:
                    why = "found no blocks" if full else "have filled the answer"
                    outcomes.append(Refusal(Reason.NOT_TRIED, f"earlier items of the batch {why}; ask again"))
                    continue
                if is_large:
                    self._end_unanswerable(session)
            if self._evictions is not None:
                self._evictions.begin(session.holder.signatures[0], item.key, item.root)
            try:
                outcome = allocation.allocate(self._tree, self._attempts, session, item, generation, self.limits)
                outcomes.append(outcome)
                if isinstance(outcome, Granted):
                    num_blocks += sum(len(table.blocks) + len(table.scratch) for table in outcome.tables)
            except Refusal as refusal:
                full = full or refusal.reason in _OUT_OF_BLOCKS
                # Its traceback refers to this frame, and `outcomes` to it: a cycle that only the collector would free.
                outcomes.append(refusal.with_traceback(None))
        return outcomes, self._reply(session)

    def append(self, uplink: Uplink, items: List[AppendItem]) -> tuple[list[AppendOutcome], Reply]:
        """Merge updates of live sequences, then refill the reserve. Raises as `allocate` does."""
        session = self._begin(uplink, len(items))
        generation = self._stamp()
        outcomes: list[AppendOutcome] = []
        num_blocks, most_blocks = 0, self.limits.max_blocks_per_reply
        for item in items:
            if num_blocks >= most_blocks and item.want_blocks:
                outcomes.append(
                    Refusal(Reason.NOT_TRIED, "earlier items of the batch have filled the answer; ask again")
                )
                continue
            if self._evictions is not None and item.want_blocks:
                self._evictions.begin(session.holder.signatures[0], item.update.key, session.root_of(item.update.key))
            try:
                appended = updates.append(self._tree, session, item, generation, self.limits)
                outcomes.append(appended)
                if appended.new_entries:
                    num_blocks += sum(map(len, appended.new_entries))
            except Refusal as refusal:
                outcomes.append(refusal.with_traceback(None))
        self._top_up(session, generation)
        return outcomes, self._reply(session)

    def fork(self, uplink: Uplink, items: List[ForkItem]) -> tuple[list[AppendOutcome], Reply]:
        """Take in forks that the worker has made, in order, then refill the reserve. Raises as `allocate` does."""
        session = self._begin(uplink, len(items))
        outcomes: list[AppendOutcome] = []
        for item in items:
            try:
                outcomes.append(forks.fork(self._tree, self._attempts, session, item, self.limits))
            except Refusal as refusal:
                outcomes.append(refusal.with_traceback(None))
        self._top_up(session, self._stamp())
        return outcomes, self._reply(session)

    def free(self, uplink: Uplink, items: List[SequenceUpdate]) -> Reply:
        """End sequences, then refill the reserve. Raises as `allocate` does, never for an item."""
        session = self._begin(uplink, len(items))
        for update in items:
            updates.free(self._tree, self._attempts, session, update, self.limits)
        self._top_up(session, self._stamp())
        return self._reply(session)

    def _end_unanswerable(self, session: Session) -> NoReturn:
        """End a session whose answer is too large and cannot be cut: every live sequence that is asked for must get its table."""
        self._retire(session, SessionEnd.REPLY_TOO_LARGE)
        raise Refusal(
            Reason.STALE_SESSION,
            f"session {session.number:#x} has ended: the tables of the live sequences that it asked for again have more than "
            f"{self.limits.max_blocks_per_reply} blocks; register again, and ask for fewer in one call",
        )

    # -- looking

    def route(
        self,
        root: Root,
        tokens: bytes,
        max_workers: int = 0,
        *,
        num_encoder_tokens: int = 0,
        num_needed_tokens: int = 0,
    ) -> list[RoutedWorker]:
        """Workers that serve text under the root, are not leaving and have room for a text of `num_needed_tokens`, best first. An
        empty fingerprint means the one model that such workers serve. `num_encoder_tokens`: of the input that the root names, if it
        names one.

        Raises Refusal: BAD_FIELD.
        """
        self._require_prompt(tokens)
        root = self._with_fingerprint(root)
        model = self._candidates.of_model(root.model_fingerprint)
        hash_function = self._hash_function
        return route(self._tree, model, root, tokens, hash_function, max_workers, num_encoder_tokens, num_needed_tokens)

    def served_model(self, root: Root) -> ServedModel | None:
        """What the workers that route() may name serve, whatever their size; None: there is none. Raises Refusal: BAD_FIELD."""
        return self._candidates.of_model(self._with_fingerprint(root).model_fingerprint).served()

    def explain(self, root: Root, tokens: bytes, worker_id: str = "", bounds: Bounds = THOROUGH) -> PromptExplanation:
        """How much of a prompt each worker would serve from its cache, and why no more. Of the workers that Route would name, or of
        one: that one may be draining, and may serve no text. `bounds` are those of the search for the closest prompt; the others
        are constants. Changes nothing.

        Raises Refusal: BAD_FIELD, UNKNOWN_WORKER, RECOVERING.
        """
        self._require_prompt(tokens)
        if worker_id:
            session = self.worker(worker_id)
            root, candidates = self._root_at(session, root), [session]
        else:
            root = self._with_fingerprint(root)
            candidates = list(self._candidates.of_model(root.model_fingerprint).loads)
        holders: dict[Holder, Session] = {
            session.holder: session for session in self._sessions.values() if not session.recovering
        }
        search = Search(self._tree, self._hash_function, holders, self._evictions, self._explain_across_salts, bounds)
        return explain(search, candidates, root, tokens)

    def _root_at(self, session: Session, root: Root) -> Root:
        """The root as a prompt for this worker has it."""
        served = session.registration.model_fingerprint
        if root.model_fingerprint not in ("", served):
            raise bad_field(
                "root.model_fingerprint",
                f"worker {session.worker_id!r} is registered with {served!r}, got {root.model_fingerprint!r}",
            )
        if session.recovering:
            raise Refusal(
                Reason.RECOVERING,
                f"worker {session.worker_id!r} is still reporting its blocks: ask again in a moment",
            )
        return root._replace(model_fingerprint=served)

    def _require_prompt(self, tokens: bytes) -> None:
        num_tokens, rest = divmod(len(tokens), TOKEN_BYTES)
        if rest or not 0 < num_tokens <= self.limits.max_tokens_per_sequence:
            raise bad_field(
                "tokens",
                f"needed 1 to {self.limits.max_tokens_per_sequence} little-endian uint32 token ids, got {len(tokens)} bytes",
            )

    def _with_fingerprint(self, root: Root) -> Root:
        """The root with that of the only model, if it names none."""
        if root.model_fingerprint:
            return root
        if len(self._num_serving) > 1:
            serving = [session for session in self._sessions.values() if session.registration.address]
            models = sorted({session.registration.model_name for session in serving})
            raise bad_field(
                "root.model_fingerprint",
                f"name one: the workers serve several models ({', '.join(models)})",
            )
        return root._replace(model_fingerprint=next(iter(self._num_serving), ""))

    def worker(self, worker_id: str) -> Session:
        """The live session of a worker. Raises Refusal: UNKNOWN_WORKER."""
        session = self._workers.get(worker_id)
        if session is None:
            known = ", ".join(sorted(self._workers)) or "none"
            raise Refusal(Reason.UNKNOWN_WORKER, f"no live worker {worker_id!r}; live are: {known}")
        return session

    def describe_blocks(
        self, worker_id: str, first_block: int = 1, max_blocks: int = 0, group: int = 0
    ) -> list[BlockDescription]:
        """A page of the block map of a worker's group. Raises Refusal: UNKNOWN_WORKER, BAD_FIELD."""
        return describe_blocks(self.worker(worker_id), group, first_block, max_blocks)

    def check(self) -> Audit:
        """Audit every law at once. Time grows with the number of blocks, some seconds for a million."""
        return audit(self._world())

    def begin_audit(self) -> OnlineAudit:
        """An audit of every law in slices, between which this manager may do anything. One at a time; `close` it."""
        return OnlineAudit(self._world())

    def _world(self) -> World:
        return World(
            self._tree, self._attempts, self.budget, self._sessions, self._retired, lambda: self.last_generation
        )


def _check_acknowledgement(session: Session, downlink_ack: int) -> None:
    """Refuse an acknowledgement of entries that were never sent: later entries with their numbers would be lost."""
    last = session.downlink.last_number
    if downlink_ack > last:
        raise bad_field("downlink_ack", f"at most {last}, the number of the last entry sent, got {downlink_ack}")
