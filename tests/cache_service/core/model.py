"""A second cache manager: slow, small and meant to be obviously right. The real one is compared with it after every step.

It shares no code with the core, only the plain data of `messages` and the list of reasons. Prefixes are whole tuples of tokens;
nothing is hashed, linked or counted: whatever can be derived is derived anew each time it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvpool.cache_service.core.groups.state import StateSpec
from kvpool.cache_service.core.groups.unit import UnitSpec
from kvpool.cache_service.core.groups.window import WindowSpec
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Appended,
    AppendItem,
    BlockCounts,
    Boundary,
    ForkItem,
    Grant,
    Granted,
    GrantedTable,
    Limits,
    Registration,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    Stop,
    TableEntry,
    Uplink,
    Wait,
)
from kvpool.cache_service.core.refusal import Reason, Refusal

Prefix = tuple[Root, tuple[int, ...]]
"""What a sealed block holds: the KV of the last block of these tokens, computed behind the others under this root. In a group with
cross attention: of the encoder's input, as a unit; the tokens are the number of the block in it."""


def token_ids(tokens: bytes) -> list[int]:
    """Little-endian uint32 bytes as numbers."""
    return [int.from_bytes(tokens[i : i + 4], "little") for i in range(0, len(tokens), 4)]


_OUT_OF_BLOCKS = (Reason.NO_BLOCKS, Reason.TOO_MANY_BLOCKS, Reason.TOO_MANY_TOKENS)


class Refused(Exception):
    """The model's no. It is equal to the core's, which has words too."""

    def __init__(self, reason: Reason, position: int | None = None) -> None:
        super().__init__(reason.value)
        self.reason = reason
        self.position = position

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused | Refusal) and (self.reason, self.position) == (other.reason, other.position)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Refused({self.reason.value}, {self.position})"


@dataclass(eq=False)
class ModelWindow:
    """What a sequence has in a group with a window."""

    entries: dict[int, int]
    """Named blocks by table index."""
    scratch: list[int]
    ends: list[int] = field(default_factory=list)
    """Where windows end that the sequence has named itself."""


@dataclass(eq=False)
class ModelSequence:
    """A live sequence."""

    key: SequenceKey
    root: Root
    tokens: list[int]
    num_prompt_tokens: int
    tables: list[list[int]]
    """By group; empty in groups with a window."""
    windows: list[ModelWindow | None]
    """By group; None in groups without a window."""
    num_cached_tokens: int
    num_computed_tokens: int
    num_named: list[int]
    boundaries: list[int]
    """In blocks: where it is to name windows, as far as it has not computed so far."""
    kept: list[int]
    """In blocks: boundaries that were asked for."""
    kept_interval: int
    """In blocks: its multiples were asked for too; 0: none."""
    fenced: bool = False
    encoder_computed: bool = False
    """With cross attention: the KV of the encoder's input is complete."""

    def prefix(self, index: int, block_size: int) -> Prefix:
        """What the full block at a table index holds."""
        return self.root, tuple(self.tokens[: (index + 1) * block_size])

    def num_nodes(self, block_size: int) -> int:
        """Full blocks of its prompt, or of all that it has computed, if that is more."""
        return max(self.num_prompt_tokens, self.num_computed_tokens) // block_size

    def was_asked_to_keep(self, boundary: int) -> bool:
        """Whether the item that it came with names this boundary, in blocks."""
        return boundary in self.kept or (self.kept_interval > 0 and boundary % self.kept_interval == 0)

    def has(self, group: int) -> list[int]:
        """All its blocks in a group."""
        window = self.windows[group]
        return self.tables[group] + ([] if window is None else [*window.entries.values(), *window.scratch])

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
    siblings: list[ModelPool]
    """All pools of the session."""
    span: int
    """Blocks before a boundary that its layers see: all that a hit needs. 1 for snapshots. 0: all of them, it has no window."""
    ring: int
    """With a window: scratch blocks of one sequence."""
    max_encoder_tokens: int
    """With cross attention; 0: without."""
    idle: list[int]
    """Blocks that nobody has: those that hold nothing, the next to be granted first, and then the sealed ones, which are still
    hits, in the order in which they were let go."""
    generation: dict[int, int]
    demoted: list[int] = field(default_factory=list)
    """Those of the idle and sealed ones that go before the others, in the order in which they were let go."""
    sealed: list[tuple[int, Prefix]] = field(default_factory=list)
    """In the order of sealing: the first block with a prefix is the one that serves its hits."""
    reserved: set[int] = field(default_factory=set)
    reserve_wish: int = 0
    num_evicted: int = 0

    @property
    def capacity(self) -> int:
        """Blocks without the null block."""
        return len(self.generation)

    @property
    def free_list(self) -> list[int]:
        """Next to be granted first; sealed ones among them are cached."""
        empty = [block for block in self.idle if self.content(block) is None]
        rest = [block for block in self.idle if block not in empty and block not in self.demoted]
        return empty + self.demoted + rest

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
        """How often live sequences have the block."""
        return sum(sequence.has(self.group).count(block) for sequence in self.sequences)

    def counts(self, left: int) -> BlockCounts:
        """Blocks by state, counted one by one; `left` as for `num_withheld`."""
        blocks = range(1, self.capacity + 1)
        cached = sum(1 for block in self.idle if self.content(block) is not None)
        return BlockCounts(
            capacity=self.capacity,
            free=len(self.idle) - cached - self.num_withheld(left),
            cached=cached,
            held=sum(1 for block in blocks if self.ref_count(block)),
            reserved=len(self.reserved),
            copying=0,
            shared=sum(1 for block in blocks if self.ref_count(block) >= 2),
            withheld=self.num_withheld(left),
        )

    def _forget(self, block: int) -> None:
        self.sealed = [(other, prefix) for other, prefix in self.sealed if other != block]

    def use(self, blocks: list[int]) -> None:
        """They are idle no more, if they were."""
        self.idle = [block for block in self.idle if block not in blocks]
        self.demoted = [block for block in self.demoted if block not in blocks]

    def take(self, count: int, generation: int, left: int) -> list[int]:
        """Grant the first blocks of the free list, stepping over those that are withheld. Inside a grant the demoted ones come
        first, the last of them before the others, which means nothing."""
        last = self.last_granted + left
        while self.max_encoder_tokens and sum(self.content(b) is None and b <= last for b in self.free_list) < count:
            self._evict_unit()
        blocks = [block for block in self.free_list if block <= last][:count]
        assert len(blocks) == count
        blocks.sort(key=lambda block: -self.demoted.index(block) if block in self.demoted else 1)
        self.use(blocks)
        for block in blocks:
            prefix = self.content(block)
            if prefix is not None:
                self.num_evicted += 1
                self._forget(block)
                if not self.span and not self.hit(prefix):
                    self._empty_windows(prefix)
            assert generation > self.generation[block]
            self.generation[block] = generation
        return blocks

    def _evict_unit(self) -> None:
        """All blocks with the input of the one that is next to go hold nothing any more, and are granted next."""
        root = next(content[0] for block in self.free_list if (content := self.content(block)) is not None)
        blocks = self.unit(root)
        assert all(block in self.idle for block in blocks)
        self.idle = blocks + [block for block in self.idle if block not in blocks]
        for block in blocks:
            self._forget(block)
        self.num_evicted += len(blocks)

    def unit(self, root: Root) -> list[int]:
        """The blocks with the input of a root, in order."""
        return [
            block for _, block in sorted((content[1], block) for block, content in self.sealed if content[0] == root)
        ]

    def seal_unit(self, blocks: list[int], root: Root) -> None:
        """They are the root's unit from now on, if it has none."""
        if not self.unit(root):
            self.sealed += [(block, (root, (index,))) for index, block in enumerate(blocks)]

    def _empty_windows(self, prefix: Prefix) -> None:
        """A block of a window serves nothing where a group without a window has lost the prefix."""
        for pool in self.siblings:
            block = pool.hit(prefix)
            if pool.span and block:
                assert block in pool.idle
                pool.use([block])
                pool._forget(block)
                pool.idle.insert(0, block)

    def is_reserved(self, block: int, generation: int) -> bool:
        """Whether the block is in the reserve by that grant."""
        return block in self.reserved and self.generation[block] == generation

    def unreserve(self, block: int, generation: int) -> None:
        """A named block comes back, if it is in the reserve by that grant."""
        if self.is_reserved(block, generation):
            self.reserved.remove(block)
            self.idle.insert(0, block)

    def let_go(self, block: int, *, demoted: bool = False) -> None:
        """A sequence has given up a block, which was taken from its tables. If it is a hit then, it is kept."""
        if self.ref_count(block):
            return
        prefix = self.content(block)
        if prefix is not None and self.hit(prefix) == block:
            self.idle.append(block)
            if demoted:
                self.demoted.append(block)
        else:
            self._forget(block)
            self.idle.insert(0, block)


@dataclass(eq=False)
class ModelSession:
    """One registration of a worker."""

    number: int
    registration: Registration
    lease_end: float
    sequences: list[ModelSequence] = field(default_factory=list)
    """In the order of granting."""
    pending: list[tuple[int, Grant | Stop | Boundary]] = field(default_factory=list)
    last_number: int = 0
    last_call_no: int = 0
    has_called: bool = False
    """A call of the session has come."""
    takes_prompts: bool = True
    """Until it has called, not if the session before it never did."""

    def __post_init__(self) -> None:
        self.pools: list[ModelPool] = []
        for index, group in enumerate(self.registration.layout.groups):
            blocks = range(1, group.num_blocks)
            span = 0
            while isinstance(group, WindowSpec) and span * self.block_size < group.window_tokens - 1:
                span += 1
            if isinstance(group, StateSpec):
                span = 1
            generation = dict.fromkeys(blocks, 0)
            scratch = group.ring_blocks if isinstance(group, WindowSpec) else 0
            scratch = group.scratch_blocks if isinstance(group, StateSpec) else scratch
            most = group.max_encoder_tokens if isinstance(group, UnitSpec) else 0
            pool = ModelPool(index, self.sequences, self.pools, span, scratch, most, list(blocks), generation)
            self.pools.append(pool)

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.registration.layout.block_size

    def on_grid(self, boundary: int) -> int:
        """The last place up to a boundary, in blocks, at which every state may be kept."""
        grids = [one.grid_tokens for one in self.registration.layout.groups if isinstance(one, StateSpec)]
        while any(boundary * self.block_size % grid for grid in grids):
            boundary -= 1
        return boundary

    @property
    def full_pools(self) -> list[ModelPool]:
        """Of groups whose layers see all of the text."""
        return [pool for pool in self.pools if not pool.span and not pool.max_encoder_tokens]

    @property
    def unit_pool(self) -> ModelPool | None:
        """Of the group with cross attention."""
        return next((pool for pool in self.pools if pool.max_encoder_tokens), None)

    @property
    def window_pools(self) -> list[ModelPool]:
        """Of groups with a window."""
        return [pool for pool in self.pools if pool.span]

    def longest_table(self, limits: Limits) -> int:
        """Blocks of one group that a sequence can have: as many as the smallest pool, if they fit into what all may have."""
        most_of_all = min(limits.max_total_blocks, limits.max_total_tokens // self.block_size)
        capacities = [pool.capacity for pool in self.full_pools]
        return min([limits.max_blocks_per_sequence, most_of_all // len(self.pools), *capacities])

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

    def num_hits(self, prefixes: list[Prefix]) -> int:
        """How many of the first of these need not be computed: tried from all of them down to none."""
        for count in range(len(prefixes), 0, -1):
            if all(
                pool.hit(prefix)
                for pool in self.full_pools + self.window_pools
                for prefix in prefixes[max(0, count - pool.span) if pool.span else 0 : count]
            ):
                return count
        return 0

    def push(self, entry: Grant | Stop | Boundary) -> None:
        """The next entry of the downlink."""
        self.last_number += 1
        self.pending.append((self.last_number, entry))

    def acknowledge(self, number: int) -> None:
        """The worker has applied the downlink up to `number`."""
        self.pending = [(other, entry) for other, entry in self.pending if other > number]

    def seal(self, sequence: ModelSequence, num_computed_tokens: int) -> None:
        """More tokens are computed: the blocks of tables that are full now become hits for all."""
        before = sequence.num_computed_tokens // self.block_size
        sequence.num_computed_tokens = max(sequence.num_computed_tokens, num_computed_tokens)
        for index in range(before, sequence.num_computed_tokens // self.block_size):
            for pool in self.full_pools:
                pool.sealed.append((sequence.tables[pool.group][index], sequence.prefix(index, self.block_size)))


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
        earlier = [s for s in self.sessions if s.registration.worker_id == worker_id]
        self._end(earlier)
        self.sessions.append(ModelSession(number, registration, now + self.lease_seconds))
        self.sessions[-1].takes_prompts = all(session.has_called for session in earlier)

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
        session.has_called = session.takes_prompts = True
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
        # All together: each takes its blocks in turn, in the order of the groups, and leaves the next one less.
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
        session.has_called = session.takes_prompts = True
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
            outcomes.append(_or_refused(self._allocate, session, item, generation))
        return outcomes

    def _allocate(self, session: ModelSession, item: AllocateItem, generation: int) -> Granted | Wait:
        key, size = item.key, session.block_size
        tokens = token_ids(item.tokens)
        most_blocks = -(-(len(tokens) + max(item.max_new_tokens, 1) - 1) // size)
        if most_blocks > session.longest_table(self.limits):
            raise Refused(Reason.NEVER_FITS)
        if len(tokens) + item.max_new_tokens > self.limits.max_total_tokens:
            raise Refused(Reason.NEVER_FITS)
        if any(min(most_blocks, pool.span + pool.ring) > pool.capacity for pool in session.window_pools):
            raise Refused(Reason.NEVER_FITS)
        units, num_unit_blocks = session.unit_pool, -(-item.num_encoder_tokens // size)
        if not (units is not None) <= item.num_encoder_tokens <= (units.max_encoder_tokens if units else 0):
            raise Refused(Reason.BAD_FIELD)
        if units is not None and not item.root.input_digest:
            raise Refused(Reason.BAD_FIELD)
        if units is not None and num_unit_blocks > units.capacity:
            raise Refused(Reason.NEVER_FITS)
        if len(item.boundaries) > self.limits.max_asked_boundaries:
            raise Refused(Reason.BAD_FIELD)
        self._require_attempt(session, key)
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
            if units is not None and len(living.tables[units.group]) != num_unit_blocks:
                raise Refused(Reason.BAD_FIELD)
            return self._granted(session, living)
        if len(session.sequences) >= self.limits.max_sequences_per_session:
            raise Refused(Reason.TOO_MANY_SEQUENCES)

        # At least one token is left to compute.
        most_hits = (len(tokens) - 1) // size
        if item.max_cached_tokens is not None:
            most_hits = min(most_hits, item.max_cached_tokens // size)
        prefixes: list[Prefix] = [(item.root, tuple(tokens[: (i + 1) * size])) for i in range(len(tokens) // size)]
        num_hits = session.num_hits(prefixes[:most_hits])
        unit = units.unit(item.root) if units is not None and item.max_cached_tokens != 0 else []
        if unit and len(unit) != num_unit_blocks:
            raise Refused(Reason.BAD_FIELD)
        if not item.no_wait:
            find_wait = self._wait_for_window if session.window_pools else self._wait
            wait = find_wait(session, key, prefixes, num_hits, most_hits)
            if wait is None and not unit:
                wait = self._wait_for_unit(session, item)
            if wait is not None:
                return wait

        num_fresh = -(-len(tokens) // size) - num_hits
        hits = [
            {
                index: pool.hit(prefixes[index])
                for index in range(num_hits)
                if not pool.span or index >= num_hits - pool.span
            }
            for pool in session.pools
        ]
        num_needed = [min(pool.ring, most_blocks - num_hits) if pool.span else num_fresh for pool in session.pools]
        if units is not None:
            hits[units.group] = dict(enumerate(unit))
            num_needed[units.group] = 0 if unit else num_unit_blocks
        self._require_blocks(session, num_needed, [list(found.values()) for found in hits])
        if len(tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        kept = [session.on_grid(boundary // size) for boundary in item.boundaries]
        kept_interval = -(-item.retention_interval // size)
        while session.on_grid(kept_interval) < kept_interval:
            kept_interval += 1
        boundaries = self._boundaries(session, prefixes, num_hits, (len(tokens) - 1) // size, kept, kept_interval)
        tables: list[list[int]] = []
        windows: list[ModelWindow | None] = []
        for pool, found in zip(session.pools, hits, strict=True):
            pool.use(list(found.values()))
        for pool, found in zip(session.pools, hits, strict=True):
            fresh = pool.take(num_needed[pool.group], generation, self.left(session))
            tables.append([] if pool.span else [*found.values(), *fresh])
            windows.append(ModelWindow(found, fresh) if pool.span else None)
        sequence = ModelSequence(
            key=key,
            root=item.root,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            tables=tables,
            windows=windows,
            num_cached_tokens=num_hits * size,
            num_computed_tokens=num_hits * size,
            num_named=[num_unit_blocks if pool is units else num_hits + num_fresh for pool in session.pools],
            encoder_computed=bool(unit),
            boundaries=boundaries if session.window_pools else [],
            kept=kept,
            kept_interval=kept_interval,
        )
        self._enter(session, sequence)
        return self._granted(session, sequence)

    def _require_attempt(self, session: ModelSession, key: SequenceKey) -> None:
        """Refuse an attempt if a larger one lives, or the same one elsewhere."""
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

    def _enter(self, session: ModelSession, sequence: ModelSequence) -> None:
        """A new sequence lives, and fences its smaller attempts."""
        key = sequence.key
        for other_session in self.sessions:
            for other in other_session.sequences:
                if other.key.sequence_id == key.sequence_id and other.key.attempt < key.attempt and not other.fenced:
                    other.fenced = True
                    if len(other_session.pending) < self.limits.max_downlink_entries:
                        other_session.push(Stop(other.key))
        session.sequences.append(sequence)

    def _granted(self, session: ModelSession, sequence: ModelSequence) -> Granted:
        tables = []
        for pool, table, window in zip(session.pools, sequence.tables, sequence.windows, strict=True):
            if window is None:
                tables.append(GrantedTable(tuple(table), tuple(pool.generation[block] for block in table)))
                continue
            places = range(min(window.entries), max(window.entries) + 1) if window.entries else range(0)
            blocks = [window.entries.get(index, 0) for index in places]
            generations = [pool.generation[block] if block else 0 for block in blocks]
            scratch = tuple(ReservedBlock(block, pool.generation[block]) for block in window.scratch)
            tables.append(GrantedTable(tuple(blocks), tuple(generations), places.start, scratch))
        boundaries = tuple(boundary * session.block_size for boundary in sequence.boundaries)
        return Granted(tuple(tables), sequence.num_cached_tokens, boundaries, sequence.encoder_computed)

    def _wait_for_unit(self, session: ModelSession, item: AllocateItem) -> Wait | None:
        """The oldest sequence that is about to run the encoder over the same input."""
        for leader in session.sequences if session.unit_pool is not None else ():
            is_other = not leader.fenced and leader.key.sequence_id != item.key.sequence_id
            if is_other and leader.root == item.root and not leader.encoder_computed:
                return Wait(leader.key, 0)
        return None

    def _boundaries(
        self,
        session: ModelSession,
        prefixes: list[Prefix],
        num_hits: int,
        last: int,
        kept: list[int],
        kept_interval: int,
    ) -> list[int]:
        """Where windows are to be named: at the end of the prompt, where it leaves what is known, and where it was asked for."""
        size = session.block_size
        nodes = self.nodes()
        num_known = 0
        while num_known < len(prefixes) and (prefixes[num_known], size) in nodes:
            num_known += 1
        last = session.on_grid(last)
        wanted = [last]
        if num_known:
            parting = prefixes[num_known - 1]
            others = [s for other in self.sessions if other.block_size == size for s in other.sequences]
            if self.children(parting, size) or any(s.leads(num_known - 1, parting, size) for s in others):
                wanted.append(session.on_grid(num_known))
        wanted += sorted(set(kept))
        wanted += [boundary for boundary in range(1, last + 1) if kept_interval and boundary % kept_interval == 0]
        new = [boundary for boundary in dict.fromkeys(wanted) if num_hits < boundary <= last]
        return sorted(new[: self.limits.max_boundaries])

    def _wait_for_window(
        self, session: ModelSession, key: SequenceKey, prefixes: list[Prefix], num_hits: int, most_hits: int
    ) -> Wait | None:
        """The oldest of the sequences that are computing the deepest of the missing blocks that anybody is computing. It is to name
        its window there; if it cannot be told any more, the last window before that has to do."""
        for end in range(min(most_hits, len(prefixes)), num_hits, -1):
            for leader in session.sequences:
                if leader.fenced or leader.key.sequence_id == key.sequence_id:
                    continue
                if not leader.leads(end - 1, prefixes[end - 1], session.block_size):
                    continue
                end = session.on_grid(end)
                if end * session.block_size <= leader.num_computed_tokens:
                    return None
                is_told = len(session.pending) < self.limits.max_downlink_entries
                if end not in leader.boundaries and is_told and len(leader.boundaries) < self.limits.max_boundaries:
                    leader.boundaries = sorted([*leader.boundaries, end])
                    session.push(Boundary(leader.key, end * session.block_size))
                named = [boundary for boundary in leader.boundaries if num_hits < boundary <= end]
                return Wait(leader.key, max(named) * session.block_size) if named else None
        return None

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
        outcomes = [_or_refused(self._append, session, item, generation) for item in items]
        self.top_up(session, generation)
        return outcomes

    def _append(self, session: ModelSession, item: AppendItem, generation: int) -> Appended:
        sequence = self._find(session, item.update.key)
        tokens, tables = self._merged(session, sequence, item.update)
        if item.want_blocks > session.longest_table(self.limits):
            raise Refused(Reason.NEVER_FITS)
        num_missing = [
            0 if pool not in session.full_pools else max(0, item.want_blocks - len(table))
            for pool, table in zip(session.pools, tables, strict=True)
        ]
        self._require_blocks(session, num_missing, [[] for _ in tables])
        self._apply(session, sequence, item.update, tokens, tables)
        entries = []
        for pool, table in zip(session.pools, sequence.tables, strict=True):
            table += pool.take(num_missing[pool.group], generation, self.left(session))
            is_full = item.want_blocks and pool in session.full_pools
            unnamed = range(sequence.num_named[pool.group], len(table)) if is_full else ()
            entries.append(tuple(TableEntry(index, table[index], pool.generation[table[index]]) for index in unnamed))
        num_sealed_tokens = sequence.num_computed_tokens // session.block_size * session.block_size
        return Appended(num_sealed_tokens, tuple(entries) if any(entries) else ())

    def _find(self, session: ModelSession, key: SequenceKey) -> ModelSequence:
        """The live sequence of that round."""
        sequence = session.find(key.sequence_id, key.attempt)
        if sequence is None or key.round > sequence.key.round:
            raise Refused(Reason.UNKNOWN_SEQUENCE)
        if key.round < sequence.key.round:
            raise Refused(Reason.STALE_ROUND)
        if sequence.fenced:
            raise Refused(Reason.STALE_ATTEMPT)
        return sequence

    def fork(self, uplink: Uplink, items: tuple[ForkItem, ...], generation: int) -> list[Appended | Refused]:
        """Sequences that begin with blocks of others."""
        session = self.begin(uplink)
        outcomes = [_or_refused(self._fork, session, item) for item in items]
        self.top_up(session, generation)
        return outcomes

    def _fork(self, session: ModelSession, item: ForkItem) -> Appended:
        key, size = item.update.key, session.block_size
        self._require_attempt(session, key)
        living = session.find(key.sequence_id, key.attempt)
        if living is not None:
            if key.round > living.key.round:
                raise Refused(Reason.FREE_FIRST)
            return self._append(session, AppendItem(item.update), 0)
        parent = self._find(session, item.parent)
        if len(session.sequences) >= self.limits.max_sequences_per_session:
            raise Refused(Reason.TOO_MANY_SEQUENCES)
        num_shared = item.num_shared_blocks
        if num_shared > parent.num_computed_tokens // size:
            raise Refused(Reason.GAP, parent.num_computed_tokens // size * size)
        units = session.unit_pool
        if units is not None and not parent.encoder_computed:
            raise Refused(Reason.GAP, 0)
        num_own = [
            len(t) if units is not None and g == units.group else num_shared for g, t in enumerate(parent.tables)
        ]
        child = ModelSequence(
            key=key,
            root=parent.root,
            tokens=parent.tokens[: num_shared * size],
            num_prompt_tokens=0,  # it leads nobody: what is generated is not known before
            tables=[table[:count] for table, count in zip(parent.tables, num_own, strict=True)],
            windows=[None if window is None else ModelWindow({}, []) for window in parent.windows],
            encoder_computed=parent.encoder_computed,
            num_cached_tokens=0,
            num_computed_tokens=num_shared * size,
            num_named=[min(count, len(table)) for table, count in zip(parent.tables, num_own, strict=True)],
            boundaries=[],
            kept=parent.kept,
            kept_interval=parent.kept_interval,
        )
        tokens, tables = self._merged(session, child, item.update)
        if len(tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        self._enter(session, child)
        self._apply(session, child, item.update, tokens, tables)
        return Appended(child.num_computed_tokens // size * size)

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
        if len(update.bound) > len(session.pools):
            raise Refused(Reason.BAD_FIELD)
        for pool, table, bound in zip(session.pools, tables, update.bound, strict=False):
            num_known = len(table)
            for index, block, generation in () if pool.span else bound:
                right_stamp = pool.generation.get(block) == generation
                if index < num_known:
                    if table[index] != block or not right_stamp:
                        raise Refused(Reason.STALE_GENERATION)
                elif index == len(table) and block in pool.reserved and block not in table and right_stamp:
                    table.append(block)
                else:
                    raise Refused(Reason.STALE_GENERATION)
        if len(tokens) - len(sequence.tokens) > self.tokens_left():
            raise Refused(Reason.TOO_MANY_TOKENS)
        num_slots = [len(tables[pool.group]) * session.block_size for pool in session.full_pools]
        if update.num_computed_tokens > min([len(tokens), *num_slots]):
            raise Refused(Reason.BAD_FIELD)
        units = session.unit_pool
        is_encoded = sequence.encoder_computed or update.encoder_computed
        num_computed = max(update.num_computed_tokens, sequence.num_computed_tokens)
        if update.encoder_computed if units is None else num_computed > sequence.num_cached_tokens and not is_encoded:
            raise Refused(Reason.BAD_FIELD)
        if units is not None and len(tables[units.group]) > len(sequence.tables[units.group]):
            raise Refused(Reason.BAD_FIELD)
        if max(len(update.scratch), len(update.released)) > len(session.pools):
            raise Refused(Reason.BAD_FIELD)
        for pool in session.full_pools + ([] if units is None else [units]):
            if any(_of(update.scratch, pool)) or any(_of(update.released, pool)):
                raise Refused(Reason.BAD_FIELD)
        num_full = max(update.num_computed_tokens, sequence.num_computed_tokens) // session.block_size
        for pool in session.window_pools:
            self._check_window(pool, sequence, update, num_full)
        return tokens, tables

    def _check_window(self, pool: ModelPool, sequence: ModelSequence, update: SequenceUpdate, num_full: int) -> None:
        """Each block that is stated must be where it is stated to be, or the sequence's to put there, once. What the update
        releases anyway need not be anywhere."""
        window = sequence.windows[pool.group]
        assert window is not None
        released = [(block, generation) for _, block, generation in _of(update.released, pool)]
        newly_named: list[int] = []
        for index, block, generation in _of(update.bound, pool):
            if index >= num_full:
                raise Refused(Reason.BAD_FIELD)
            if window.entries.get(index) == block and pool.generation[block] == generation:
                continue
            is_own = _is_own(pool, window, block, generation)
            is_refused = not is_own or block in newly_named or index in window.entries
            if is_refused and (block, generation) not in released:
                raise Refused(Reason.STALE_GENERATION)
            if is_own:
                newly_named.append(block)
        for block, generation in _of(update.scratch, pool):
            if (block, generation) in released:
                continue
            if not _is_own(pool, window, block, generation) or block in newly_named:
                raise Refused(Reason.STALE_GENERATION)

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
        for pool in session.full_pools:
            named = [entry.table_index + 1 for entry in _of(update.bound, pool)]
            sequence.num_named[pool.group] = max([sequence.num_named[pool.group], *named])
        session.seal(sequence, update.num_computed_tokens)
        if update.encoder_computed and session.unit_pool is not None and not sequence.encoder_computed:
            sequence.encoder_computed = True
            session.unit_pool.seal_unit(sequence.tables[session.unit_pool.group], sequence.root)
        for pool in session.window_pools:
            self._apply_window(session, pool, sequence, update)
        num_full = sequence.num_computed_tokens // session.block_size
        sequence.boundaries = [boundary for boundary in sequence.boundaries if boundary > num_full]

    def _apply_window(
        self, session: ModelSession, pool: ModelPool, sequence: ModelSequence, update: SequenceUpdate
    ) -> None:
        """First what it has begun to use, then what has got a place, then what it uses no more."""
        window = sequence.windows[pool.group]
        assert window is not None
        for block, generation in _of(update.scratch, pool):
            if pool.is_reserved(block, generation):
                pool.reserved.remove(block)
                window.scratch.append(block)
        end = -1
        for index, block, generation in _of(update.bound, pool):
            if index not in window.entries and _is_own(pool, window, block, generation):
                # A window is named from its first block to its last: where one ends is known at the last.
                if pool.span > 1:
                    window.ends = [other for other in window.ends if other != end or index != end]
                end = index + 1
                if end not in window.ends:
                    window.ends.append(end)
                pool.reserved.discard(block)
                window.scratch = [other for other in window.scratch if other != block]
                window.entries[index] = block
                pool.sealed.append((block, sequence.prefix(index, session.block_size)))
        for index, block, generation in _of(update.released, pool):
            if pool.generation.get(block) != generation:
                continue
            if window.entries.get(index) == block:
                del window.entries[index]
                pool.let_go(block, demoted=not self._is_worth_keeping(session, pool, sequence, index))
                window.ends = [end for end in window.ends if end != index + 1]
            elif block in window.scratch:
                window.scratch.remove(block)
                pool.let_go(block)
            else:
                pool.unreserve(block, generation)

    def _is_worth_keeping(self, session: ModelSession, pool: ModelPool, sequence: ModelSequence, index: int) -> bool:
        """Whether one of the windows that the block is part of ends where prompts part, where it was asked for, or where the
        sequence has named one."""
        size = session.block_size
        window = sequence.windows[pool.group]
        assert window is not None
        for boundary in range(index + 1, min(index + pool.span, sequence.num_nodes(size)) + 1):
            prefix = sequence.prefix(boundary - 1, size)
            if boundary in window.ends or sequence.was_asked_to_keep(boundary) or len(self.children(prefix, size)) > 1:
                return True
        return False

    def _end_sequence(self, session: ModelSession, sequence: ModelSequence) -> None:
        """It lets go of all that it has: of tables the last block first, of windows the one that others may go on from last."""
        for pool in session.full_pools:
            table = sequence.tables[pool.group]
            while table:
                pool.let_go(table.pop())
        for pool in session.window_pools:
            window = sequence.windows[pool.group]
            assert window is not None
            while window.scratch:
                pool.let_go(window.scratch.pop(0))
            window.ends.append(max(window.entries, default=-1) + 1)
            for index in sorted(window.entries, reverse=True):
                block = window.entries.pop(index)
                pool.let_go(block, demoted=not self._is_worth_keeping(session, pool, sequence, index))
        units = session.unit_pool
        if units is not None:
            unit = sequence.tables[units.group]
            if sequence.encoder_computed:
                units.seal_unit(unit, sequence.root)
            while unit:
                units.let_go(unit.pop(0))
        session.sequences.remove(sequence)

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
                self._end_sequence(session, sequence)
            for pool in session.pools:
                stated = [(block, stamp) for _, block, stamp in _of(update.bound, pool)]
                stated += _of(update.scratch, pool)
                stated += [(block, stamp) for _, block, stamp in _of(update.released, pool)]
                for block, stamp in stated:
                    pool.unreserve(block, stamp)
        self.top_up(session, generation)

    # -- looking

    def nodes(self) -> set[tuple[Prefix, int]]:
        """With the block size: every prefix of something sealed, or of the full blocks of a live prompt or a live sealed
        continuation."""
        nodes: set[tuple[Prefix, int]] = set()
        for session in self.sessions:
            size = session.block_size
            deepest = [prefix for pool in session.full_pools + session.window_pools for _, prefix in pool.sealed]
            whole = [sequence for sequence in session.sequences if sequence.num_nodes(size)]
            deepest += [sequence.prefix(sequence.num_nodes(size) - 1, size) for sequence in whole]
            for root, tokens in deepest:
                for end in range(size, len(tokens) + 1, size):
                    nodes.add(((root, tokens[:end]), size))
        return nodes

    def children(self, prefix: Prefix, block_size: int) -> list[Prefix]:
        """What goes on from a prefix by one block, on any worker."""
        root, tokens = prefix
        return [
            (other_root, others)
            for (other_root, others), size in self.nodes()
            if (other_root, size, len(others)) == (root, block_size, len(tokens) + block_size)
            and others[: len(tokens)] == tokens
        ]

    def has_unit(self, session: ModelSession, root: Root) -> bool:
        """Whether a worker holds the KV of the input that a root names."""
        return session.unit_pool is not None and bool(session.unit_pool.unit(root))

    def reach(self, session: ModelSession, root: Root, tokens: list[int]) -> tuple[int, int]:
        """Tokens of a prompt that a worker holds, and that it holds or is computing, short of the last token."""
        size = session.block_size
        prefixes: list[Prefix] = [(root, tuple(tokens[: (i + 1) * size])) for i in range((len(tokens) - 1) // size)]
        cached = session.num_hits(prefixes)
        led = [any(s.leads(index, prefix, size) for s in session.sequences) for index, prefix in enumerate(prefixes)]
        if session.window_pools:
            # What it computes last is where it names its windows.
            deepest = max([0, *(index + 1 for index, is_led in enumerate(led) if is_led)])
            return cached * size, max(cached, session.on_grid(deepest)) * size
        reached = 0
        # A block may be held although one before it is not any more, and is computed again.
        while reached < len(prefixes) and (
            led[reached] or all(pool.hit(prefixes[reached]) for pool in session.full_pools)
        ):
            reached += 1
        return cached * size, reached * size


_T = TypeVar("_T")


def _or_refused(call: Callable[..., _T], *arguments: object) -> _T | Refused:
    """What the call returns or refuses."""
    try:
        return call(*arguments)
    except Refused as refused:
        return refused


def _of(groups: tuple[tuple[_T, ...], ...], pool: ModelPool) -> tuple[_T, ...]:
    """What is stated of a pool's group."""
    return groups[pool.group] if pool.group < len(groups) else ()


def _is_own(pool: ModelPool, window: ModelWindow, block: int, generation: int) -> bool:
    """Whether the block is the sequence's to give a place to."""
    return pool.generation.get(block) == generation and (block in window.scratch or block in pool.reserved)
