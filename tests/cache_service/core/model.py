"""A second cache manager: slow, small and meant to be obviously right. The real one is compared with it after every step.

It shares no code with the core, only the plain data of `messages` and the list of reasons. Prefixes are whole tuples of tokens;
nothing is hashed, linked or counted: whatever can be derived is derived anew each time it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    BlockCounts,
    Grant,
    Granted,
    Limits,
    Registration,
    Root,
    SequenceKey,
    SequenceUpdate,
    Stop,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason

Prefix = tuple[Root, tuple[int, ...]]
"""What a sealed block holds: the KV of the last block of these tokens, computed behind the others under this root."""


def token_ids(tokens: bytes) -> list[int]:
    """Little-endian uint32 bytes as numbers."""
    return [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]


_OUT_OF_BLOCKS = (Reason.NO_BLOCKS, Reason.TOO_MANY_BLOCKS, Reason.TOO_MANY_TOKENS)


class Refused(Exception):
    """The model's no."""

    def __init__(self, reason: Reason, position: int | None = None) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.position = position

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused) and (self.reason, self.position) == (other.reason, other.position)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Refused({self.reason.value}, {self.position})"


@dataclass(eq=False)
class ModelSequence:
    """A live sequence."""

    key: SequenceKey
    root: Root
    tokens: list[int]
    num_prompt_tokens: int
    table: list[int]
    num_cached_tokens: int
    num_computed_tokens: int
    num_named: int
    fenced: bool = False

    def prefix(self, index: int, block_size: int) -> Prefix:
        """What the full block at a table index holds."""
        return self.root, tuple(self.tokens[: (index + 1) * block_size])

    def leads(self, index: int, prefix: Prefix, block_size: int) -> bool:
        """Whether it is going to compute the block that holds `prefix`, as part of its prompt."""
        prompt_blocks = self.num_prompt_tokens // block_size
        sealed_blocks = self.num_computed_tokens // block_size
        return sealed_blocks <= index < prompt_blocks and self.prefix(index, block_size) == prefix


@dataclass(eq=False)
class ModelSession:
    """One registration of a worker."""

    number: int
    registration: Registration
    lease_end: float
    free_list: list[int]
    """Next to be granted first; sealed ones among them are cached."""
    generation: dict[int, int]
    sealed: list[tuple[int, Prefix]] = field(default_factory=list)
    """In the order of sealing: the first block with a prefix is the one that serves its hits."""
    reserved: set[int] = field(default_factory=set)
    sequences: list[ModelSequence] = field(default_factory=list)
    """In the order of granting."""
    pending: list[tuple[int, Grant | Stop]] = field(default_factory=list)
    last_number: int = 0
    last_call_no: int = 0
    reserve_wish: int = 0
    num_evicted: int = 0

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.registration.pool.block_size

    @property
    def capacity(self) -> int:
        """Blocks without the null block."""
        return self.registration.pool.num_blocks - 1

    def find(self, sequence_id: str, attempt: int) -> ModelSequence | None:
        """The live sequence, in whatever round."""
        for sequence in self.sequences:
            if (sequence.key.sequence_id, sequence.key.attempt) == (sequence_id, attempt):
                return sequence
        return None

    def content(self, block: int) -> Prefix | None:
        """What a sealed block holds."""
        return next((prefix for other, prefix in self.sealed if other == block), None)

    def hit(self, prefix: Prefix) -> int:
        """The block that serves hits on a prefix; 0 if none."""
        return next((block for block, other in self.sealed if other == prefix), 0)

    @property
    def last_granted(self) -> int:
        """The highest block that was ever granted."""
        return max((block for block, generation in self.generation.items() if generation), default=0)

    def num_withheld(self, left: int) -> int:
        """Blocks that were never granted, less the `left` ones that the budget of all leaves."""
        return max(0, self.capacity - self.last_granted - left)

    def ref_count(self, block: int) -> int:
        """Table entries that name the block."""
        return sum(sequence.table.count(block) for sequence in self.sequences)

    def counts(self, left: int) -> BlockCounts:
        """Blocks by state, counted one by one; `left` as for `num_withheld`."""
        blocks = range(1, self.capacity + 1)
        cached = sum(1 for block in self.free_list if self.content(block) is not None)
        return BlockCounts(
            capacity=self.capacity,
            free=len(self.free_list) - cached - self.num_withheld(left),
            cached=cached,
            held=sum(1 for block in blocks if self.ref_count(block)),
            reserved=len(self.reserved),
            copying=0,
            shared=sum(1 for block in blocks if self.ref_count(block) >= 2),
            withheld=self.num_withheld(left),
        )

    def _forget(self, block: int) -> None:
        self.sealed = [(other, prefix) for other, prefix in self.sealed if other != block]

    def take(self, count: int, generation: int, left: int) -> list[int]:
        """Grant the first blocks of the free list, stepping over those that are withheld."""
        last = self.last_granted + left
        blocks = [block for block in self.free_list if block <= last][:count]
        assert len(blocks) == count
        self.free_list = [block for block in self.free_list if block not in blocks]
        for block in blocks:
            if self.content(block) is not None:
                self.num_evicted += 1
                self._forget(block)
            assert generation > self.generation[block]
            self.generation[block] = generation
        return blocks

    def push(self, entry: Grant | Stop) -> None:
        """The next entry of the downlink."""
        self.last_number += 1
        self.pending.append((self.last_number, entry))

    def acknowledge(self, number: int) -> None:
        """The worker has applied the downlink up to `number`."""
        self.pending = [(other, entry) for other, entry in self.pending if other > number]

    def unreserve(self, block: int, generation: int) -> None:
        """A named block comes back, if it is in the reserve by that grant."""
        if block in self.reserved and self.generation[block] == generation:
            self.reserved.remove(block)
            self.free_list.insert(0, block)

    def top_up(self, generation: int, limits: Limits, left: int) -> bool:
        """Fill the reserve up to the wish with what there is, some at a time; returns whether any block was granted."""
        num_available = len(self.free_list) - self.num_withheld(left)
        count = min(self.reserve_wish - len(self.reserved), num_available, limits.max_blocks_per_grant)
        if count <= 0 or len(self.pending) >= limits.max_downlink_entries:
            return False
        blocks = self.take(count, generation, left)
        self.reserved.update(blocks)
        self.push(Grant(tuple(blocks), generation))
        return True

    def seal(self, sequence: ModelSequence, num_computed_tokens: int) -> None:
        """More tokens are computed: the blocks that are full now become hits for all."""
        before = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_computed_tokens)
        for index in range(before, sequence.num_computed_tokens // self.block_size):
            self.sealed.append((sequence.table[index], sequence.prefix(index, self.block_size)))

    def end(self, sequence: ModelSequence) -> None:
        """Let go of the table, the last block first."""
        self.sequences.remove(sequence)
        while sequence.table:
            block = sequence.table.pop()
            if self.ref_count(block) or block in sequence.table:
                continue
            prefix = self.content(block)
            if prefix is not None and self.hit(prefix) == block:
                self.free_list.append(block)
            else:
                self._forget(block)
                self.free_list.insert(0, block)


class Model:
    """The manager. Every method takes what the real one takes, and the generation that the real call may give."""

    def __init__(self, lease_seconds: float, tick_seconds: float, limits: Limits) -> None:
        self.lease_seconds = lease_seconds
        self.tick_seconds = tick_seconds
        self.limits = limits
        self.sessions: list[ModelSession] = []
        self.newest: dict[str, Registration] = {}
        """The last one of each worker that was taken."""
        self.forgets_at: dict[str, float] = {}
        """When an older process of a worker without a session is taken again."""
        self.last_tick: float | None = None

    # -- sessions

    def session(self, number: int) -> ModelSession:
        """The live session with that number."""
        for session in self.sessions:
            if session.number == number:
                return session
        raise Refused(Reason.STALE_SESSION)

    def register(self, registration: Registration, number: int, now: float) -> None:
        """Begin session `number`; the worker's earlier one ends."""
        worker_id = registration.worker_id
        newest = self.newest.get(worker_id)
        lives = any(session.registration.worker_id == worker_id for session in self.sessions)
        if newest is not None:
            same_process = newest.process_key == registration.process_key
            if registration.incarnation > newest.incarnation:
                if lives and registration.predecessor_key != newest.process_key:
                    raise Refused(Reason.WORKER_ELSEWHERE)
            elif registration.incarnation == newest.incarnation and same_process:
                if registration.register_no <= newest.register_no:
                    raise Refused(Reason.STALE_REGISTER)
            elif lives or now < self.forgets_at[worker_id]:
                raise Refused(Reason.STALE_INCARNATION)
        self.newest[worker_id] = registration
        self._end([s for s in self.sessions if s.registration.worker_id == worker_id])
        blocks = range(1, registration.pool.num_blocks)
        self.sessions.append(
            ModelSession(number, registration, now + self.lease_seconds, list(blocks), dict.fromkeys(blocks, 0))
        )

    def deregister(self, number: int) -> None:
        """End a session, if it lives."""
        self._end([session for session in self.sessions if session.number == number])

    def _end(self, sessions: list[ModelSession]) -> None:
        for session in sessions:
            self.sessions.remove(session)
            self.forgets_at[session.registration.worker_id] = session.lease_end + self.lease_seconds

    def keep_alive(self, number: int, downlink_ack: int, now: float, generation: int) -> bool:
        """Renew a lease, and refill the reserve; returns whether the generation was needed."""
        session = self.session(number)
        if downlink_ack > session.last_number:
            raise Refused(Reason.BAD_FIELD)
        session.lease_end = now + self.lease_seconds
        session.acknowledge(downlink_ack)
        return session.top_up(generation, self.limits, self.left(session))

    # -- the budget

    def left(self, session: ModelSession) -> int:
        """Further blocks of a session that may be granted for the first time, counted over all sessions."""
        num_blocks = sum(other.last_granted for other in self.sessions)
        num_slots = sum(other.last_granted * other.block_size for other in self.sessions)
        slots_left = self.limits.max_total_tokens - num_slots
        return min(self.limits.max_total_blocks - num_blocks, slots_left // session.block_size)

    def tokens_left(self) -> int:
        """Further tokens that live sequences may have."""
        kept = sum(len(sequence.tokens) for session in self.sessions for sequence in session.sequences)
        return self.limits.max_total_tokens - kept

    def _require_blocks(self, session: ModelSession, num_needed: int, hits: list[int]) -> None:
        """Refuse unless so many blocks can be granted beside the hits."""
        num_there = sum(1 for block in session.free_list if block not in hits)
        num_withheld = session.num_withheld(self.left(session))
        if num_needed > num_there:
            raise Refused(Reason.NO_BLOCKS)
        if num_needed > num_there - num_withheld:
            num_new = num_needed - (num_there - num_withheld) + self.left(session)
            num_blocks = sum(other.last_granted for other in self.sessions)
            is_of_blocks = num_new > self.limits.max_total_blocks - num_blocks
            raise Refused(Reason.TOO_MANY_BLOCKS if is_of_blocks else Reason.TOO_MANY_TOKENS)

    def tick(self, now: float) -> list[int]:
        """Numbers of the sessions that end now. Time in which the manager stood still does not count."""
        if self.last_tick is not None and now - self.last_tick > 2 * self.tick_seconds:
            stood_still = now - self.last_tick - 2 * self.tick_seconds
            for session in self.sessions:
                session.lease_end = min(session.lease_end + stood_still, now + self.lease_seconds)
        self.last_tick = now
        expired = [session for session in self.sessions if session.lease_end <= now]
        self._end(expired)
        return [session.number for session in expired]

    # -- the link

    def begin(self, uplink: Uplink) -> ModelSession:
        """Execute the head of a call, or refuse the call."""
        session = self.session(uplink.session)
        if uplink.call_no <= session.last_call_no:
            raise Refused(Reason.STALE_CALL)
        if uplink.call_no > session.last_call_no + self.limits.max_numbers_skipped:
            raise Refused(Reason.BAD_FIELD)
        if uplink.downlink_ack > session.last_number:
            raise Refused(Reason.BAD_FIELD)
        session.last_call_no = uplink.call_no
        session.acknowledge(uplink.downlink_ack)
        if uplink.reserve_wish is not None:
            session.reserve_wish = min(uplink.reserve_wish, session.capacity, self.limits.max_reserve_blocks)
        for block, generation in uplink.returned:
            session.unreserve(block, generation)
        return session

    def allocate(
        self, uplink: Uplink, items: tuple[AllocateItem, ...], generation: int
    ) -> list[Granted | Wait | Refused]:
        """Tables, in order, until one finds no blocks; behind it only the tables of what lives already."""
        session = self.begin(uplink)
        session.top_up(generation, self.limits, self.left(session))
        outcomes: list[Granted | Wait | Refused] = []
        for item in items:
            is_full = any(isinstance(outcome, Refused) and outcome.reason in _OUT_OF_BLOCKS for outcome in outcomes)
            if is_full and session.find(item.key.sequence_id, item.key.attempt) is None:
                outcomes.append(Refused(Reason.NOT_TRIED))
                continue
            try:
                outcomes.append(self._allocate(session, item, generation))
            except Refused as refused:
                outcomes.append(refused)
        return outcomes

    def _allocate(self, session: ModelSession, item: AllocateItem, generation: int) -> Granted | Wait:
        key, size = item.key, session.block_size
        tokens = token_ids(item.tokens)
        most_blocks = -(-(len(tokens) + max(item.max_new_tokens, 1) - 1) // size)
        if most_blocks > min(session.capacity, self.limits.max_blocks_per_sequence, self.limits.max_total_blocks):
            raise Refused(Reason.NEVER_FITS)
        if max(most_blocks * size, len(tokens) + item.max_new_tokens) > self.limits.max_total_tokens:
            raise Refused(Reason.NEVER_FITS)
        attempts = {
            (other.key.attempt, other_session)
            for other_session in self.sessions
            for other in other_session.sequences
            if other.key.sequence_id == key.sequence_id
        }
        if any(attempt > key.attempt for attempt, _ in attempts):
            raise Refused(Reason.STALE_ATTEMPT)
        if any(attempt == key.attempt and where is not session for attempt, where in attempts):
            raise Refused(Reason.SEQUENCE_ELSEWHERE)
        living = session.find(key.sequence_id, key.attempt)
        if living is not None:
            if living.fenced:
                raise Refused(Reason.STALE_ATTEMPT)
            if key.round < living.key.round:
                raise Refused(Reason.STALE_ROUND)
            if key.round > living.key.round:
                raise Refused(Reason.FREE_FIRST)
            if living.root != item.root or living.tokens[: len(tokens)] != tokens:
                raise Refused(Reason.TOKENS_DIFFER, 0)
            return self._granted(session, living)
        if len(session.sequences) >= self.limits.max_sequences_per_session:
            raise Refused(Reason.TOO_MANY_SEQUENCES)

        # At least one token is left to compute.
        most_hits = (len(tokens) - 1) // size
        if item.max_cached_tokens is not None:
            most_hits = min(most_hits, item.max_cached_tokens // size)
        prefixes: list[Prefix] = [(item.root, tuple(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]
        hits: list[int] = []
        while len(hits) < most_hits and session.hit(prefixes[len(hits)]):
            hits.append(session.hit(prefixes[len(hits)]))
        if not item.no_wait:
            wait = self._wait(session, key, prefixes, len(hits), most_hits)
            if wait is not None:
                return wait

        num_fresh = -(-len(tokens) // size) - len(hits)
        self._require_blocks(session, num_fresh, hits)
        if len(tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        left = self.left(session)
        session.free_list = [block for block in session.free_list if block not in hits]
        sequence = ModelSequence(
            key=key,
            root=item.root,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            table=hits + session.take(num_fresh, generation, left),
            num_cached_tokens=len(hits) * size,
            num_computed_tokens=len(hits) * size,
            num_named=len(hits) + num_fresh,
        )
        for other_session in self.sessions:
            for other in other_session.sequences:
                if other.key.sequence_id == key.sequence_id and other.key.attempt < key.attempt and not other.fenced:
                    other.fenced = True
                    if len(other_session.pending) < self.limits.max_downlink_entries:
                        other_session.push(Stop(other.key))
        session.sequences.append(sequence)
        return self._granted(session, sequence)

    def _granted(self, session: ModelSession, sequence: ModelSequence) -> Granted:
        return Granted(
            tuple(sequence.table),
            tuple(session.generation[block] for block in sequence.table),
            sequence.num_cached_tokens,
        )

    def _wait(
        self, session: ModelSession, key: SequenceKey, prefixes: list[Prefix], num_hits: int, most_hits: int
    ) -> Wait | None:
        """The oldest of the sequences that are computing the most of what is missing, from its first block on."""
        best: Wait | None = None
        for leader in session.sequences:
            if leader.fenced or leader.key.sequence_id == key.sequence_id:
                continue
            end = num_hits
            while end < most_hits and leader.leads(end, prefixes[end], session.block_size):
                end += 1
            if end > num_hits and (best is None or end * session.block_size > best.position):
                best = Wait(leader.key, end * session.block_size)
        return best

    def append(self, uplink: Uplink, items: tuple[AppendItem, ...], generation: int) -> list[Appended | Refused]:
        """Merge updates of live sequences."""
        session = self.begin(uplink)
        outcomes: list[Appended | Refused] = []
        for item in items:
            try:
                outcomes.append(self._append(session, item, generation))
            except Refused as refused:
                outcomes.append(refused)
        session.top_up(generation, self.limits, self.left(session))
        return outcomes

    def _append(self, session: ModelSession, item: AppendItem, generation: int) -> Appended:
        key = item.update.key
        sequence = session.find(key.sequence_id, key.attempt)
        if sequence is None or key.round > sequence.key.round:
            raise Refused(Reason.UNKNOWN_SEQUENCE)
        if key.round < sequence.key.round:
            raise Refused(Reason.STALE_ROUND)
        if sequence.fenced:
            raise Refused(Reason.STALE_ATTEMPT)
        tokens, table = self._merged(session, sequence, item.update)
        if item.want_blocks > min(session.capacity, self.limits.max_blocks_per_sequence):
            raise Refused(Reason.NEVER_FITS)
        num_missing = max(0, item.want_blocks - len(table))
        self._require_blocks(session, num_missing, [])
        self._apply(session, sequence, item.update, tokens, table)
        sequence.table += session.take(num_missing, generation, self.left(session))
        entries: tuple[TableEntry, ...] = ()
        if item.want_blocks:
            entries = tuple(
                TableEntry(index, block, session.generation[block])
                for index, block in enumerate(sequence.table)
                if index >= sequence.num_named
            )
        return Appended(sequence.num_computed_tokens // session.block_size * session.block_size, entries)

    def _merged(
        self, session: ModelSession, sequence: ModelSequence, update: SequenceUpdate
    ) -> tuple[list[int], list[int]]:
        """Tokens and table with the update in them; refuses an update that does not join on."""
        stated = token_ids(update.tokens)
        tokens = list(sequence.tokens)
        if update.start > len(tokens):
            raise Refused(Reason.GAP, len(tokens))
        for position, token in enumerate(stated, update.start):
            if position == len(tokens):
                tokens.append(token)
            elif tokens[position] != token:
                raise Refused(Reason.TOKENS_DIFFER, position)
        table = list(sequence.table)
        for index, block, generation in update.bound:
            right_stamp = session.generation.get(block) == generation
            if index < len(table):
                if table[index] != block or not right_stamp:
                    raise Refused(Reason.STALE_GENERATION)
            elif index == len(table) and block in session.reserved and block not in table and right_stamp:
                table.append(block)
            else:
                raise Refused(Reason.STALE_GENERATION)
        if len(tokens) - len(sequence.tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        if update.num_computed_tokens > min(len(tokens), len(table) * session.block_size):
            raise Refused(Reason.BAD_FIELD)
        return tokens, table

    def _apply(
        self,
        session: ModelSession,
        sequence: ModelSequence,
        update: SequenceUpdate,
        tokens: list[int],
        table: list[int],
    ) -> None:
        sequence.tokens, sequence.table = tokens, table
        session.reserved -= set(table)
        for entry in update.bound:
            sequence.num_named = max(sequence.num_named, entry.table_index + 1)
        session.seal(sequence, update.num_computed_tokens)

    def free(self, uplink: Uplink, items: tuple[SequenceUpdate, ...], generation: int) -> None:
        """End sequences."""
        session = self.begin(uplink)
        for update in items:
            sequence = session.find(update.key.sequence_id, update.key.attempt)
            if sequence is not None and sequence.key.round <= update.key.round:
                if sequence.key.round == update.key.round:
                    try:
                        tokens, table = self._merged(session, sequence, update)
                    except Refused:
                        pass
                    else:
                        self._apply(session, sequence, update, tokens, table)
                session.end(sequence)
            for _, block, stamp in update.bound:
                session.unreserve(block, stamp)
        session.top_up(generation, self.limits, self.left(session))

    # -- looking

    def reach(self, session: ModelSession, root: Root, tokens: list[int]) -> tuple[int, int]:
        """Tokens of a prompt that a worker holds, and that it holds or is computing, short of the last token."""
        size = session.block_size
        prefixes: list[Prefix] = [(root, tuple(tokens[: (i + 1) * size])) for i in range((len(tokens) - 1) // size)]
        cached = 0
        while cached < len(prefixes) and session.hit(prefixes[cached]):
            cached += 1
        reached = 0
        while reached < len(prefixes) and (
            session.hit(prefixes[reached])
            or any(sequence.leads(reached, prefixes[reached], size) for sequence in session.sequences)
        ):
            reached += 1
        return cached * size, reached * size
