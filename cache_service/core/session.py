"""A session: one registration of a worker, with its groups, lease, downlink and live sequences.

A `Group` is what the session has of the layers whose KV is in the same blocks. There is one subclass for each kind of group, in the
package `groups`; a call asks each group for its part and knows no kind. What a group is asked, call by call:

    Register    check_spec, most_blocks, longest_input
    Allocate    check_item; longest_hit: how much of a path need not be computed; hit: what is pinned; in_flight: whom to wait for;
                num_wanted: what is to be granted; enter: the sequence has it; granted: the table for the answer
    Append      new_blocks, check: refuse what is wrong; apply
    Fork        fork
    Free        release; leave, if only the sequence goes
    Report      check_reported, restore
    displays    blocks and what follows there
    Check       violations

A group that is *whole* has a table with a block for each block of the text, so a hit needs a copy of every node there: a look-up
can pass a node if these have it. One that is *dependent* needs copies of some nodes, and they are of no use without the copies in
the whole groups. A group that is neither *holds* no *nodes*.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from enum import Enum
from typing import Any, ClassVar, TypeVar

from .block_pool import CACHED, FREE, RESERVED, BlockPool, State
from .budget import Account
from .copies import Holder
from .downlink import Downlink
from .messages import (
    TOKEN_BYTES,
    AllocateItem,
    BlockCounts,
    Drain,
    GrantedTable,
    GroupSpec,
    Limits,
    MissCause,
    Registration,
    ReportedSequence,
    ReportedUnit,
    ReservedBlock,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Wait,
    WorkerLoad,
)
from .prefix_tree import Node, PrefixTree, RootNode
from .refusal import Reason, Refusal, bad_field
from .restored import Case, Restored, refuse
from .session_key import NO_KEY, SessionKey

_Entry = TypeVar("_Entry")


def of_slot(groups: tuple[tuple[_Entry, ...], ...], slot: int) -> tuple[_Entry, ...]:
    """What is stated of a group, where groups at the end may be left out."""
    return groups[slot] if slot < len(groups) else ()


Problem = tuple[str, str, int]
"""A law that does not hold in a group, a message, and the block; −1: of no one block."""


class SessionEnd(Enum):
    """Why a session is over."""

    EXPIRED = "expired"
    """Its lease ran out."""
    FENCED = "fenced"
    """Its worker registered again."""
    DEREGISTERED = "deregistered"
    BAD_REPORT = "bad_report"
    OVER_BUDGET = "over_budget"
    """Its report has more than the budget leaves room for."""
    REPLY_TOO_LARGE = "reply_too_large"
    """The answer to its Allocate exceeds the limit of a reply."""
    EPOCH_RAISED = "epoch_raised"
    """The manager's epoch was raised; all workers register again."""


def require_key(key: SequenceKey, limits: Limits, field: str) -> None:
    """Refuse a key that no sequence can have. Raises Refusal: BAD_FIELD."""
    num_id_bytes = len(key.sequence_id.encode())
    if not 1 <= num_id_bytes <= limits.max_id_bytes:
        raise bad_field(f"{field}.sequence_id", f"needed 1 to {limits.max_id_bytes} bytes, got {num_id_bytes}")
    if key.attempt < 1:
        raise bad_field(f"{field}.attempt", "needed 1 or more: attempts are counted from 1")


class Session:
    """A worker's registration, from Register until it is fenced, expires or deregisters."""

    def __init__(
        self,
        number: int,
        registration: Registration,
        groups: tuple[Group, ...],
        account: Account,
        downlink: Downlink,
        lease_end: float,
        limits: Limits,
        key: SessionKey = NO_KEY,
    ) -> None:
        self.number = number
        self.key = key
        """The secret that every call of the session must carry."""
        self.registration = registration
        self.name = registration.worker_id.encode()
        """The worker's id as bytes, for hashes."""
        self.block_size = registration.layout.block_size
        self.holder = groups[0].pool.holder
        """Under which the prefix tree knows its pools."""
        self.by_slot = groups
        """Its groups, as the worker numbers them."""
        self.pools = tuple(group.pool for group in groups)
        """The pools of all groups, by slot."""
        self.whole = tuple(group for group in groups if group.is_whole)
        self.dependents = tuple(group for group in groups if group.is_dependent)
        self.whole_pools = tuple(group.pool for group in self.whole)
        self.partial = (*(group for group in groups if not group.holds_nodes), *self.dependents)
        """All that are not whole."""
        self.groups = (*self.whole, *self.partial)
        """All: whole ones first, on whose copies dependent ones depend."""
        self.account = account
        """Its part of the budget of all workers."""
        self.grid_blocks = math.lcm(*(group.grid_blocks for group in groups))
        """Boundaries of its sequences are multiples of so many blocks."""
        self.most_blocks_per_sequence = min(
            limits.max_blocks_per_sequence,
            account.most_blocks // len(groups),
            *(group.pool.capacity for group in self.whole),
        )
        """Largest table of each whole group that can ever be granted: the smallest of all limits."""
        self.max_model_len = self._longest_text(limits)
        """Longest text that can be served, prompt and generated tokens together."""
        self.max_encoder_tokens = max(group.longest_input for group in groups)
        """Longest input of an encoder that can be served; 0 without one."""
        self.lease_end = lease_end
        """Monotonic time at which the lease runs out, in seconds."""
        self.num_heartbeats = 0
        """Heartbeats that were answered."""
        self.heard_heartbeat = -1
        """Number of the last of these answers that the worker is known to have received; 0: that of Register, -1: not even that."""
        self.follows_unheard = False
        """The worker's session before it has ended without a call."""
        self.registered_at = 0.0
        """Monotonic time of the Register, in seconds."""
        self.served_at = 0.0
        """Monotonic time of the part of its report that was `live`, in seconds."""
        self.last_call_no = 0
        """Number of the last mutating call executed."""
        self.downlink = downlink
        self.sequences: dict[tuple[str, int], Sequence] = {}
        """Live sequences by (sequence_id, attempt)."""
        self.reserve_wishes = [0] * len(groups)
        """Blocks that the worker wants in its reserve, by group."""
        self.load = WorkerLoad()
        self.recovering = False
        """It has yet to report its sequences and its reserve: look-ups skip the session, and its other calls are refused."""
        self.num_report_parts = 0
        """Parts of its complete report; 0 before."""
        self.num_blockless_contents = 0
        """Contents reported without a block; each counts as a block in the budget."""
        self.draining = False
        """The worker takes no new requests, by its own decision or by an order."""
        self.drain: Drain | None = None
        """The order."""
        self.num_calls = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        """Tokens stated by Append and Free, those allocated not included."""

    def _longest_text(self, limits: Limits) -> int:
        most_blocks = self.most_blocks_per_sequence
        num_blocks = min(group.most_blocks(most_blocks) for group in self.groups)
        # The KV of the last generated token is never computed.
        most = min(num_blocks * self.block_size + 1, limits.max_tokens_per_sequence, self.account.budget.max_tokens)
        return min(most, self.registration.max_model_len or most)

    @property
    def facts_digest(self) -> bytes:
        """Names what the worker answers of its model. Of a worker that states nothing it is another one with each session."""
        return self.registration.facts_digest or self.number.to_bytes(8, "big")

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.registration.worker_id

    def root_of(self, key: SequenceKey) -> Root | None:
        """The root of a live sequence; None if there is no such sequence."""
        sequence = self.sequences.get((key.sequence_id, key.attempt))
        return sequence.root.key[0] if sequence is not None and isinstance(sequence.root, RootNode) else None

    @property
    def retired(self) -> bool:
        """Whether it has ended: look-ups ignore it, and it counts in no budget."""
        return self.holder.retired

    def retire(self) -> None:
        """The session has ended."""
        self.holder.retired = True
        self.account.close()

    @property
    def has_called(self) -> bool:
        """Whether a call of the session has come: its worker has received the answer to Register."""
        return self.num_heartbeats > 0 or self.last_call_no > 0

    @property
    def is_unheard(self) -> bool:
        """Whether its worker registers again and again, and never calls: it does not hear the manager."""
        return self.follows_unheard and not self.has_called

    def on_grid(self, num_blocks: int) -> int:
        """The last possible boundary up to so many blocks."""
        return num_blocks - num_blocks % self.grid_blocks

    def counts(self) -> tuple[BlockCounts, ...]:
        """Blocks by state, by group."""
        return tuple([pool.counts() for pool in self.pools])

    def require_groups(self, num_groups: int, field: str) -> None:
        """Raise Refusal (BAD_FIELD) if a message names more groups than the worker has."""
        if num_groups > len(self.pools):
            raise bad_field(
                field,
                f"worker {self.worker_id!r} is registered with {len(self.pools)} groups, got group {num_groups - 1}",
            )

    def never_fits(self, num_blocks: int, limits: Limits, *, needed: str, cure: str, field: str) -> Refusal:
        """The refusal of tables that can never be granted. It names the first limit that `num_blocks` of each group exceed;
        `needed` and `cure` are what was asked for and what else the worker can do, in words."""
        budget = self.account.budget
        capacity, group = min(((group.pool.capacity, group.slot) for group in self.whole), default=(num_blocks, 0))
        if num_blocks > limits.max_blocks_per_sequence:
            limit = f"a sequence has at most {limits.max_blocks_per_sequence}"
            setting = "give the worker larger blocks (--block-size)"
        elif num_blocks > capacity:
            limit = f"the whole pool{self.of_group(group)} of worker {self.worker_id!r} has {capacity}"
            setting = "give the worker more blocks (--num-blocks, --kv-cache-memory)"
        else:
            limit = f"all workers together may have {budget.max_blocks} blocks and {budget.max_tokens} tokens"
            setting = "raise --max-total-blocks and --max-total-tokens of the manager"
        return Refusal(Reason.NEVER_FITS, f"{needed}; {limit}: {cure}, or {setting}", field=field)

    def of_group(self, group: int) -> str:
        """Return which group is meant, for messages: empty if the session has only one."""
        return f" of group {group}" if len(self.pools) > 1 else ""

    def require_available(self, num_blocks: List[int], hits: List[List[int]] = ()) -> None:
        """Raise Refusal (NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS) unless `num_blocks` of each group can be granted now while
        `hits` of each group, which may be cached blocks, are pinned."""
        for group, pool in enumerate(self.pools):
            num_available, pinned = pool.num_available, hits[group] if hits else ()
            if num_blocks[group] + len(pinned) <= num_available:
                continue  # even if all of them are cached: nearly always
            num_available -= pool.num_cached_of(pinned)
            if num_blocks[group] > num_available:
                raise self._no_blocks(group, num_blocks[group], num_available)
        if len(self.pools) > 1 and self.account.budget.is_tight:
            self._require_budget(num_blocks, hits)

    def _require_budget(self, num_blocks: List[int], hits: List[List[int]]) -> None:
        """Each pool alone has room, but blocks that were never granted come out of one budget, in the order of the groups."""
        blocks_left = self.account.blocks_left
        for group, (pool, count) in enumerate(zip(self.pools, num_blocks, strict=True)):
            num_new = pool.num_new_of(count, blocks_left)
            num_others = pool.num_available + pool.num_withheld - pool.num_never_granted
            if hits:
                num_others -= pool.num_cached_of(hits[group])
            if count > num_others + num_new:
                raise self.account.too_many_blocks(sum(num_blocks))
            blocks_left -= num_new

    def _no_blocks(self, group: int, num_blocks: int, num_available: int) -> Refusal:
        counts = self.pools[group].counts()
        if num_blocks <= num_available + counts.withheld:
            return self.account.too_many_blocks(num_blocks - num_available + self.account.blocks_left)
        return Refusal(
            Reason.NO_BLOCKS,
            f"needed {num_blocks} blocks{self.of_group(group)}; worker {self.worker_id!r} has {counts.free} free and "
            f"{num_available - counts.free} evictable of {counts.capacity} ({counts.held} held, {counts.reserved} reserved): wait "
            "until sequences end, or give the worker more blocks (--num-blocks)",
        )

    def __repr__(self) -> str:
        return f"<Session {self.number:#x} of {self.worker_id!r} sequences={len(self.sequences)} {self.counts()}>"


class KeptBoundaries:
    """Boundaries, in blocks, that somebody has asked for: some, and the multiples of an interval, if that is not 0."""

    __slots__ = ("_interval", "_some")

    def __init__(self, some: Iterable[int] = (), interval: int = 0) -> None:
        self._some = frozenset(some)
        self._interval = interval

    def __contains__(self, boundary: int) -> bool:
        return boundary in self._some or bool(self._interval and boundary % self._interval == 0)

    def between(self, first: int, last: int) -> Iterator[int]:
        """Those of first … last: the single ones, in order, then the multiples."""
        yield from sorted(boundary for boundary in self._some if first <= boundary <= last)
        if self._interval:
            yield from range(-(-first // self._interval) * self._interval, last + 1, self._interval)


NONE_KEPT = KeptBoundaries()


class Sequence:
    """One (sequence_id, attempt) on one session, in its current round."""

    __slots__ = (
        "boundaries",
        "encoder_computed",
        "fenced",
        "kept",
        "key",
        "nodes",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named",
        "num_sealed",
        "root",
        "session",
        "tables",
        "tokens",
    )

    def __init__(self, key: SequenceKey, session: Session, root: Node, tokens: bytes) -> None:
        self.key = key
        self.session = session
        self.root = root
        """Parent of the first node."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and those that Append has stated since."""
        self.tables: list[Any] = []
        """What each group keeps of the sequence, by slot; in a whole group the block ids from position 0 on. Whoever grants the
        blocks sets it, and `num_named`."""
        self.boundaries: tuple[int, ...] = ()
        """Boundaries in blocks, ascending, at which the worker was asked to name windows and up to which it is not known to have
        computed."""
        self.kept = NONE_KEPT
        """Boundaries that somebody has asked for: their windows are kept like hits."""
        self.nodes: list[Node] = []
        """Path of the prompt's full blocks, and of others as they are sealed."""
        self.num_sealed = 0
        """Leading blocks of the tables that are sealed, hits included."""
        self.num_cached_tokens = 0
        """Tokens served from the cache when the sequence was granted."""
        self.num_computed_tokens = 0
        """Tokens whose KV the worker has reported as completed, hits included."""
        self.num_named: list[int] = []
        """Leading entries of each group's table that the worker has named or Allocate has granted, by group."""
        self.encoder_computed = False
        """With cross attention: the KV of the encoder's input is complete."""
        self.fenced = False
        """A larger attempt lives on another session; only Free is accepted."""

    def __repr__(self) -> str:
        key = self.key
        return (
            f"<Sequence {key.sequence_id!r} attempt={key.attempt} round={key.round} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} tables={self.tables}{' fenced' if self.fenced else ''}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def holder(self) -> Holder:
        """Under which the prefix tree knows the pools of its tables."""
        return self.session.holder

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, in all groups."""
        return sum(map(len, self.tables))


class Group:
    """One group of a session, and its pool. See the top of this file. What is the same for most kinds is here: a table is a list
    of blocks."""

    is_whole: ClassVar[bool] = False
    is_dependent: ClassVar[bool] = False
    holds_nodes: ClassVar[bool] = True
    pool_type: ClassVar[type[BlockPool]] = BlockPool

    grid_blocks = 1
    """What it keeps for others it keeps after multiples of so many blocks."""
    miss: MissCause | None = None
    """The cause that Explain gives if a dependent group lacks what a hit needs; None: it is not dependent."""
    longest_input = 0
    """Tokens of the longest encoder's input that can be served."""

    def __init__(self, spec: GroupSpec, pool: BlockPool, block_size: int) -> None:
        self.spec = spec
        self.pool = pool
        self.slot = pool.slot
        """Its number."""
        self.block_size = block_size

    @staticmethod
    def is_of(spec: GroupSpec) -> bool:
        """Whether this is the kind of group that a worker introduces so."""
        raise NotImplementedError

    @staticmethod
    def check_spec(field: str, specs: List[GroupSpec], slot: int, block_size: int, limits: Limits) -> None:
        """Raise Refusal (BAD_FIELD) if the group at `slot` of these cannot be served. `field`: its name in the message."""

    def most_blocks(self, most: int) -> int:
        """The longest text that the group has room for, in blocks, if the whole groups have room for `most`."""
        return most

    # -- Allocate

    def check_item(self, session: Session, item: AllocateItem, num_blocks: int) -> None:
        """Raise Refusal (BAD_FIELD, NEVER_FITS) if a sequence can never be served. `num_blocks`: of its longest text."""

    def check_length(self, item: AllocateItem, num_blocks: int) -> None:
        """Raise Refusal (BAD_FIELD) if what the item needs is known with another number of blocks."""

    def longest_hit(self, path: List[Node], most: int) -> int:
        """Return the longest hit, in blocks, among the first `most` nodes of a path. Dependent groups only."""
        raise NotImplementedError

    def hit(self, item: AllocateItem, root: Node | None, path: List[Node], num: int) -> list[int]:
        """The blocks that a hit of the first `num` nodes has here; of a whole group up to the first that is missing. Raises
        Refusal: BAD_FIELD."""
        raise NotImplementedError

    def in_flight(self, item: AllocateItem, root: Node | None, hit: List[int]) -> Wait | None:
        """The sequence that computes what the item needs, apart from the nodes of its path."""
        return None

    def num_wanted(self, item: AllocateItem, num_hits: int, hit: List[int]) -> int:
        """Return how many blocks to grant to the sequence. Partial groups only: a whole one grants what is left of the text."""
        raise NotImplementedError

    def enter(self, sequence: Sequence, fresh: list[int], num_hits: int) -> None:
        """The sequence, whose table is the hit, has been granted these blocks."""
        sequence.tables[self.slot] += fresh

    def granted(self, sequence: Sequence) -> GrantedTable:
        """Its present table."""
        table = sequence.tables[self.slot]
        return GrantedTable(tuple(table), self.pool.generations(table))

    # -- Append and Free

    def new_blocks(self, sequence: Sequence, bound: tuple[TableEntry, ...]) -> list[int]:
        """The blocks that an update adds to a table; each block named must be that entry already, or be reserved here. Raises
        Refusal: STALE_GENERATION."""
        pool, table = self.pool, sequence.tables[self.slot]
        blocks: dict[int, None] = {}
        for index, block, generation in bound:
            if index < len(table):
                if table[index] == block and pool.generation(block) == generation:
                    continue
                found = f"entry {index} is block {table[index]} of generation {pool.generation(table[index])}"
            elif index == len(table) + len(blocks) and pool.is_reserved(block, generation) and block not in blocks:
                blocks[block] = None
                continue
            else:
                found = f"the table has {len(table) + len(blocks)} entries and the block is not reserved with that generation"
            raise Refusal(
                Reason.STALE_GENERATION,
                f"sequence {sequence.key.sequence_id!r} names block {block} of generation {generation} as entry {index} of group "
                f"{self.slot}, but {found}: the worker's state is not the manager's; register again",
            )
        return list(blocks)

    def check(self, sequence: Sequence, update: SequenceUpdate, num_computed_tokens: int) -> None:
        """Refuse what an update states of a partial group. `num_computed_tokens`: the count after the update. Raises Refusal:
        BAD_FIELD, STALE_GENERATION."""

    def apply(self, tree: PrefixTree, sequence: Sequence, update: SequenceUpdate) -> None:
        """Apply a checked update whose computed blocks have their nodes. Partial groups only."""

    def release(self, sequence: Sequence) -> None:
        """The sequence ends."""
        self.pool.release(*reversed(sequence.tables[self.slot]))

    def leave(self, sequence: Sequence) -> None:
        """It leaves the tree. Its blocks stay as they are."""

    # -- Fork

    def fork(self, parent: Sequence, num_shared: int) -> Any:
        """The table of a fork as it was made; it shares the blocks there. Changes nothing. Raises Refusal: GAP."""
        return parent.tables[self.slot][:num_shared]

    # -- Report

    def check_reported(
        self, restored: Restored, reported: ReportedSequence, root: Node, path: List[Node], num_sealed: int
    ) -> None:
        """Refuse a table that contradicts what the report states of its blocks; `num_sealed` nodes of `path` are computed. Changes
        nothing. Raises Refusal: BAD_REPORT."""
        table, name = reported.tables[self.slot], reported.key.sequence_id
        seen: set[int] = set()
        blocks = restored.blocks
        for index, block, generation in table:
            complete = blocks.get(block) if blocks else None
            if block in seen:
                refuse("sequences", f"block {block} is twice in the table of {name!r}")
            seen.add(block)
            if complete is None:
                restored.require_free(block, generation)
                continue
            if index >= num_sealed:
                refuse("sequences", f"block {block} is complete, but a table that names it has not computed it yet")
            if complete != (path[index] if index < len(path) else None, generation):
                refuse(
                    "sequences", f"block {block} of generation {generation:#x} holds something else than a table says"
                )
        for block, generation in reported.scratch[self.slot]:
            if block in seen:
                refuse("sequences", f"block {block} is twice in what {name!r} has")
            seen.add(block)
            restored.require_free(block, generation)

    def restore(
        self, tree: PrefixTree, restored: Restored, sequence: Sequence, reported: ReportedSequence, num_sealed: int
    ) -> None:
        """Take in a checked table of a sequence whose first `num_sealed` nodes are computed."""
        pool, table, path = self.pool, reported.tables[self.slot], sequence.nodes
        new = [entry for entry in table if pool.is_free(entry.block)]
        for _, block, _ in table if len(new) < len(table) else ():
            if not pool.is_free(block):
                restored.cases[Case.HELD_SEALED if pool.is_cached(block) else Case.SHARED] += 1
                pool.pin(block)
        pool.restore_held([ReservedBlock(block, generation) for _, block, generation in new])
        blocks, num_before = restored.blocks, len(restored.blocks)
        for index, block, generation in new:
            if index < num_sealed:
                # Another block serves the hits of this content, or only the table states what the block holds.
                node = path[index]
                if node.block_hash is None:
                    tree.name(node)
                pool.seal(block, node)
                blocks[block] = node, generation
        num_complete = len(blocks) - num_before
        restored.cases[Case.HELD_SEALED] += num_complete
        restored.cases[Case.HELD_FILLING] += len(new) - num_complete
        sequence.tables[self.slot] = [entry.block for entry in table]
        sequence.num_named[self.slot] = len(table)

    def restore_unit(self, tree: PrefixTree, restored: Restored, unit: ReportedUnit, is_live: bool) -> None:
        """Take in the KV of an encoder's input. `is_live`: the worker is served already. Raises Refusal: BAD_REPORT."""
        refuse("units", f"group {self.slot} has no cross attention")

    # -- displays

    def blocks(self, sequence: Sequence) -> list[int]:
        """All that the sequence has, in no particular order."""
        table: list[int] = sequence.tables[self.slot]
        return table

    def places(self, sequence: Sequence) -> Iterable[tuple[int | None, int]]:
        """The same with table indexes; None: none."""
        return enumerate(self.blocks(sequence))

    def block_at(self, sequence: Sequence, index: int) -> int:
        """The block at a table index; 0 if it has none there."""
        table = self.blocks(sequence)
        return table[index] if index < len(table) else 0

    def unsealed(self, sequence: Sequence) -> List[int]:
        """Its blocks that are not sealed, in no particular order."""
        return self.blocks(sequence)[sequence.num_sealed :]

    def token_count(self, sequence: Sequence, index: int) -> int:
        """Slots of the block at a table index whose KV is known to be computed."""
        return max(0, min(self.block_size, sequence.num_computed_tokens - index * self.block_size))

    def table_index(self, block: int, node: Node) -> int:
        """Return the table index of a sealed block, which holds `node`."""
        return node.depth

    def prefix(self, block: int, node: Node) -> list[int]:
        """The blocks from table index 0 on to a sealed one; 0 where none holds that part any more."""
        blocks, at = [block], node.parent
        while at is not None and at.depth >= 0:
            blocks.append(self.pool.copy_of(at))
            at = at.parent
        return blocks[::-1]

    # -- Check

    def violations(self, sequence: Sequence) -> Iterator[Problem]:
        """Yield what is wrong with the table of a live sequence. Partial groups only."""
        yield from ()

    def violations_at(self, block: int, state: int, ref_count: int, node: Node | None) -> Iterator[Problem]:
        """What is wrong with a block, by what it holds."""
        pool = self.pool
        if node is None:
            if state == CACHED:
                yield "state", f"block {block} is cached and serves no hits", block
            elif ref_count >= 2:
                yield "fork", f"block {block} is shared by {ref_count} tables and not sealed", block
            return
        copy = pool.copy_of(node)
        if state in (FREE, RESERVED):
            yield "state", f"block {block} is {State(state).name.lower()} and still sealed", block
        elif state == CACHED and copy != block:
            yield "state", f"block {block} is cached and serves no hits", block
        if node.block_hash is None:
            yield "sealing", f"block {block} is sealed and has no hash", block
        if node.parent is None:
            yield "tree", f"block {block} holds a node that was dropped from the tree", block
        if not copy:
            yield "sealing", f"block {block} is sealed, its node knows no copy in this pool", block
        elif copy != block and not pool.is_duplicate(block, node):
            yield "sealing", f"block {block} is sealed, its node knows only block {copy}", block

    def violations_of_unit(self, root: RootNode) -> Iterator[Problem]:
        """What is wrong with what a root says that it has here beyond nodes."""
        yield from ()

    def violations_of_listed(self) -> Iterator[Problem | None]:
        """What is wrong with what is listed for eviction beyond blocks, one by one; None: nothing."""
        yield from ()
