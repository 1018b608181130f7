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
    GrantedTable,
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
    tables: list[list[int]]
    """By group."""
    num_cached_tokens: int
    num_computed_tokens: int
    num_named: list[int]
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
class ModelPool:
    """The blocks of one group."""

    group: int
    sequences: list[ModelSequence]
    """Those of the session."""
    free_list: list[int]
    """Next to be granted first; sealed ones among them are cached."""
    generation: dict[int, int]
    sealed: list[tuple[int, Prefix]] = field(default_factory=list)
    """In the order of sealing: the first block with a prefix is the one that serves its hits."""
    reserved: set[int] = field(default_factory=set)
    reserve_wish: int = 0
    num_evicted: int = 0

    @property
    def capacity(self) -> int:
        """Blocks without the null block."""
        return len(self.generation)

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
        return sum(sequence.tables[self.group].count(block) for sequence in self.sequences)

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

    def unreserve(self, block: int, generation: int) -> None:
        """A named block comes back, if it is in the reserve by that grant."""
        if block in self.reserved and self.generation[block] == generation:
            self.reserved.remove(block)
            self.free_list.insert(0, block)

    def let_go(self, table: list[int]) -> None:
        """Of an ended sequence, the last block first."""
        while table:
            block = table.pop()
            if self.ref_count(block) or block in table:
                continue
            prefix = self.content(block)
            if prefix is not None and self.hit(prefix) == block:
                self.free_list.append(block)
            else:
                self._forget(block)
                self.free_list.insert(0, block)


@dataclass(eq=False)
class ModelSession:
    """One registration of a worker."""

    number: int
    registration: Registration
    lease_end: float
    sequences: list[ModelSequence] = field(default_factory=list)
    """In the order of granting."""
    pending: list[tuple[int, Grant | Stop]] = field(default_factory=list)
    last_number: int = 0
    last_call_no: int = 0

    def __post_init__(self) -> None:
        self.pools: list[ModelPool] = []
        for index, group in enumerate(self.registration.layout.groups):
            blocks = range(1, group.num_blocks)
            self.pools.append(ModelPool(index, self.sequences, list(blocks), dict.fromkeys(blocks, 0)))

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.registration.layout.block_size

    @property
    def capacity(self) -> int:
        """Of the smallest pool."""
        return min(pool.capacity for pool in self.pools)

    @property
    def last_granted(self) -> int:
        """Blocks that count in the budget."""
        return sum(pool.last_granted for pool in self.pools)

    def find(self, sequence_id: str, attempt: int) -> ModelSequence | None:
        """The live sequence, in whatever round."""
        for sequence in self.sequences:
            if (sequence.key.sequence_id, sequence.key.attempt) == (sequence_id, attempt):
                return sequence
        return None

    def has(self, prefix: Prefix) -> bool:
        """Whether every group has the prefix."""
        return all(pool.hit(prefix) for pool in self.pools)

    def push(self, entry: Grant | Stop) -> None:
        """The next entry of the downlink."""
        self.last_number += 1
        self.pending.append((self.last_number, entry))

    def acknowledge(self, number: int) -> None:
        """The worker has applied the downlink up to `number`."""
        self.pending = [(other, entry) for other, entry in self.pending if other > number]

    def seal(self, sequence: ModelSequence, num_computed_tokens: int) -> None:
        """More tokens are computed: the blocks that are full now become hits for all."""
        before = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_computed_tokens)
        for index in range(before, sequence.num_computed_tokens // self.block_size):
            for pool in self.pools:
                pool.sealed.append((sequence.tables[pool.group][index], sequence.prefix(index, self.block_size)))

    def end(self, sequence: ModelSequence) -> None:
        """Let go of the tables."""
        self.sequences.remove(sequence)
        for pool in self.pools:
            pool.let_go(sequence.tables[pool.group])


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
        self.sessions.append(ModelSession(number, registration, now + self.lease_seconds))

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
        return self.top_up(session, generation)

    def top_up(self, session: ModelSession, generation: int) -> bool:
        """Fill the reserve up to the wishes with what there is, some at a time; returns whether any block was granted."""
        granted = False
        for pool in session.pools:
            left = self.left(session)
            num_available = len(pool.free_list) - pool.num_withheld(left)
            count = min(pool.reserve_wish - len(pool.reserved), num_available, self.limits.max_blocks_per_grant)
            if count > 0 and len(session.pending) < self.limits.max_downlink_entries:
                blocks = pool.take(count, generation, left)
                pool.reserved.update(blocks)
                session.push(Grant(tuple(blocks), generation, pool.group))
                granted = True
        return granted

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

    def _require_blocks(self, session: ModelSession, num_needed: list[int], hits: list[list[int]]) -> None:
        """Refuse unless so many blocks of each group can be granted beside the hits. `hits`: by group."""
        left = self.left(session)
        for pool in session.pools:
            num_there = sum(1 for block in pool.free_list if block not in hits[pool.group])
            num_withheld = pool.num_withheld(left)
            if num_needed[pool.group] > num_there:
                raise Refused(Reason.NO_BLOCKS)
            if num_needed[pool.group] > num_there - num_withheld:
                self._refuse_new(num_needed[pool.group] - (num_there - num_withheld) + left)
        # All together: each takes its blocks in turn, and leaves the next one less.
        for pool in session.pools:
            last = pool.last_granted
            there = [block for block in pool.free_list if block not in hits[pool.group] and block <= last + left]
            if num_needed[pool.group] > len(there):
                self._refuse_new(sum(num_needed))
            left -= max(0, max(there[: num_needed[pool.group]], default=0) - last)

    def _refuse_new(self, num_new: int) -> None:
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
        for pool, wish in zip(session.pools, uplink.reserve_wishes, strict=False):
            if wish is not None:
                pool.reserve_wish = min(wish, pool.capacity, self.limits.max_reserve_blocks)
        for pool, returned in zip(session.pools, uplink.returned, strict=False):
            for block, generation in returned:
                pool.unreserve(block, generation)
        return session

    def allocate(
        self, uplink: Uplink, items: tuple[AllocateItem, ...], generation: int
    ) -> list[Granted | Wait | Refused]:
        """Tables, in order, until one finds no blocks; behind it only the tables of what lives already."""
        session = self.begin(uplink)
        self.top_up(session, generation)
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
        of_all = most_blocks * len(session.pools)
        if (
            most_blocks > min(session.capacity, self.limits.max_blocks_per_sequence)
            or of_all > self.limits.max_total_blocks
        ):
            raise Refused(Reason.NEVER_FITS)
        if max(of_all * size, len(tokens) + item.max_new_tokens) > self.limits.max_total_tokens:
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
        num_hits = 0
        while num_hits < most_hits and session.has(prefixes[num_hits]):
            num_hits += 1
        if not item.no_wait:
            wait = self._wait(session, key, prefixes, num_hits, most_hits)
            if wait is not None:
                return wait

        num_fresh = -(-len(tokens) // size) - num_hits
        hits = [[pool.hit(prefix) for prefix in prefixes[:num_hits]] for pool in session.pools]
        self._require_blocks(session, [num_fresh] * len(hits), hits)
        if len(tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        tables = []
        for pool, found in zip(session.pools, hits, strict=True):
            pool.free_list = [block for block in pool.free_list if block not in found]
        for pool, found in zip(session.pools, hits, strict=True):
            tables.append(found + pool.take(num_fresh, generation, self.left(session)))
        sequence = ModelSequence(
            key=key,
            root=item.root,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            tables=tables,
            num_cached_tokens=num_hits * size,
            num_computed_tokens=num_hits * size,
            num_named=[num_hits + num_fresh] * len(hits),
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
        tables = [
            GrantedTable(tuple(table), tuple(pool.generation[block] for block in table))
            for pool, table in zip(session.pools, sequence.tables, strict=True)
        ]
        return Granted(tuple(tables), sequence.num_cached_tokens)

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
        self.top_up(session, generation)
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
        tokens, tables = self._merged(session, sequence, item.update)
        of_all = item.want_blocks * len(session.pools)
        is_too_much = (
            of_all > self.limits.max_total_blocks or of_all * session.block_size > self.limits.max_total_tokens
        )
        if item.want_blocks > min(session.capacity, self.limits.max_blocks_per_sequence) or is_too_much:
            raise Refused(Reason.NEVER_FITS)
        num_missing = [max(0, item.want_blocks - len(table)) for table in tables]
        self._require_blocks(session, num_missing, [[] for _ in tables])
        self._apply(session, sequence, item.update, tokens, tables)
        entries = []
        for pool, table in zip(session.pools, sequence.tables, strict=True):
            table += pool.take(num_missing[pool.group], generation, self.left(session))
            unnamed = range(sequence.num_named[pool.group], len(table)) if item.want_blocks else ()
            entries.append(tuple(TableEntry(index, table[index], pool.generation[table[index]]) for index in unnamed))
        num_sealed_tokens = sequence.num_computed_tokens // session.block_size * session.block_size
        return Appended(num_sealed_tokens, tuple(entries) if any(entries) else ())

    def _merged(
        self, session: ModelSession, sequence: ModelSequence, update: SequenceUpdate
    ) -> tuple[list[int], list[list[int]]]:
        """Tokens and tables with the update in them; refuses an update that does not join on."""
        stated = token_ids(update.tokens)
        tokens = list(sequence.tokens)
        if update.start > len(tokens):
            raise Refused(Reason.GAP, len(tokens))
        for position, token in enumerate(stated, update.start):
            if position == len(tokens):
                tokens.append(token)
            elif tokens[position] != token:
                raise Refused(Reason.TOKENS_DIFFER, position)
        tables = [list(table) for table in sequence.tables]
        for pool, table, bound in zip(session.pools, tables, update.bound, strict=False):
            for index, block, generation in bound:
                right_stamp = pool.generation.get(block) == generation
                if index < len(table):
                    if table[index] != block or not right_stamp:
                        raise Refused(Reason.STALE_GENERATION)
                elif index == len(table) and block in pool.reserved and block not in table and right_stamp:
                    table.append(block)
                else:
                    raise Refused(Reason.STALE_GENERATION)
        if len(tokens) - len(sequence.tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        if update.num_computed_tokens > min(len(tokens), min(map(len, tables)) * session.block_size):
            raise Refused(Reason.BAD_FIELD)
        return tokens, tables

    def _apply(
        self,
        session: ModelSession,
        sequence: ModelSequence,
        update: SequenceUpdate,
        tokens: list[int],
        tables: list[list[int]],
    ) -> None:
        sequence.tokens, sequence.tables = tokens, tables
        for pool, table in zip(session.pools, tables, strict=True):
            pool.reserved -= set(table)
        for group, bound in enumerate(update.bound):
            for entry in bound:
                sequence.num_named[group] = max(sequence.num_named[group], entry.table_index + 1)
        session.seal(sequence, update.num_computed_tokens)

    def free(self, uplink: Uplink, items: tuple[SequenceUpdate, ...], generation: int) -> None:
        """End sequences."""
        session = self.begin(uplink)
        for update in items:
            sequence = session.find(update.key.sequence_id, update.key.attempt)
            if sequence is not None and sequence.key.round <= update.key.round:
                if sequence.key.round == update.key.round:
                    try:
                        tokens, tables = self._merged(session, sequence, update)
                    except Refused:
                        pass
                    else:
                        self._apply(session, sequence, update, tokens, tables)
                session.end(sequence)
            for pool, bound in zip(session.pools, update.bound, strict=False):
                for _, block, stamp in bound:
                    pool.unreserve(block, stamp)
        self.top_up(session, generation)

    # -- looking

    def reach(self, session: ModelSession, root: Root, tokens: list[int]) -> tuple[int, int]:
        """Tokens of a prompt that a worker holds, and that it holds or is computing, short of the last token."""
        size = session.block_size
        prefixes: list[Prefix] = [(root, tuple(tokens[: (i + 1) * size])) for i in range((len(tokens) - 1) // size)]
        cached = 0
        while cached < len(prefixes) and session.has(prefixes[cached]):
            cached += 1
        reached = 0
        while reached < len(prefixes) and (
            session.has(prefixes[reached])
            or any(sequence.leads(reached, prefixes[reached], size) for sequence in session.sequences)
        ):
            reached += 1
        return cached * size, reached * size
