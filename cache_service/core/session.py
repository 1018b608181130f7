"""A session: one registration of a worker, with its pools, lease, downlink and live sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from enum import Enum

from .block_pool import BlockPool
from .budget import Account
from .copies import Holder
from .downlink import Downlink
from .messages import TOKEN_BYTES, BlockCounts, Drain, Limits, Registration, Root, SequenceKey, WorkerLoad
from .prefix_tree import Node, RootNode
from .refusal import Reason, Refusal, bad_field
from .session_key import NO_KEY, SessionKey
from .unit_pool import UnitPool
from .windows import NONE_KEPT, WindowTable


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
        holder: Holder,
        pools: tuple[BlockPool, ...],
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
        self.holder = holder
        """Under which the prefix tree knows its pools."""
        self.pools = pools
        """By group."""
        self.account = account
        """Its part of the budget of all workers."""
        self.full_pools = tuple(pools[slot] for slot in holder.full_slots)
        """Of the groups whose layers see all of a sequence."""
        self.window_pools = tuple(pools[slot] for slot in holder.window_slots)
        """Of the others, those with a state included."""
        self.grid_blocks = math.lcm(*(group.grid_blocks or 1 for group in registration.layout.groups))
        """Boundaries of its sequences are multiples of so many blocks."""
        self.unit_pool: UnitPool | None = None
        """Of the group with cross attention, if there is one."""
        if holder.unit_slot is not None:
            unit_pool = pools[holder.unit_slot]
            assert isinstance(unit_pool, UnitPool)
            self.unit_pool = unit_pool
        self.most_blocks_per_sequence = min(
            limits.max_blocks_per_sequence,
            account.most_blocks // len(pools),
            *(pool.capacity for pool in self.full_pools),
        )
        """Largest table of each group without a window that can ever be granted: the smallest of all limits."""
        self.max_model_len = self._longest_text(limits)
        """Longest text that can be served, prompt and generated tokens together."""
        self.max_encoder_tokens = self._longest_input()
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
        self.reserve_wishes = [0] * len(pools)
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
        num_blocks = self.most_blocks_per_sequence
        for pool in self.window_pools:  # as require_window_room has it
            scratch = self.registration.layout.groups[pool.slot].scratch_blocks
            if self.holder.spans[pool.slot] + scratch > pool.capacity:
                num_blocks = min(num_blocks, pool.capacity)
        # The KV of the last generated token is never computed.
        most = min(num_blocks * self.block_size + 1, limits.max_tokens_per_sequence, self.account.budget.max_tokens)
        return min(most, self.registration.max_model_len or most)

    def _longest_input(self) -> int:
        if self.unit_pool is None:
            return 0
        group = self.registration.layout.groups[self.unit_pool.slot]
        return min(group.max_encoder_tokens, self.unit_pool.capacity * self.block_size)

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

    def num_scratch(self, slot: int, num_blocks: int) -> int:
        """Scratch blocks, in a group with a window or a state, of a sequence that has yet to compute `num_blocks` blocks."""
        return min(self.registration.layout.groups[slot].scratch_blocks, num_blocks)

    def require_window_room(self, num_blocks: int, field: str) -> None:
        """Raise Refusal (NEVER_FITS) if a sequence of `num_blocks` blocks can never have its scratch blocks while a window that it
        hits is pinned."""
        for pool in self.window_pools:
            span, group = self.holder.spans[pool.slot], self.registration.layout.groups[pool.slot]
            needed = min(num_blocks, span + group.scratch_blocks)
            if needed > pool.capacity:
                what, setting = ("snapshot", "--state-blocks") if group.grid_blocks else ("window", "--window-blocks")
                raise Refusal(
                    Reason.NEVER_FITS,
                    f"a sequence of {num_blocks} blocks needs {needed}{self._of_group(pool.slot)}, {group.scratch_blocks} as "
                    f"scratch and {span} in a {what} that it hits; the whole pool of worker {self.worker_id!r} has "
                    f"{pool.capacity}: give the group more blocks ({setting})",
                    field=field,
                )

    def never_fits(self, num_blocks: int, limits: Limits, *, needed: str, cure: str, field: str) -> Refusal:
        """The refusal of tables that can never be granted. It names the first limit that `num_blocks` of each group exceed;
        `needed` and `cure` are what was asked for and what else the worker can do, in words."""
        budget = self.account.budget
        capacity, group = min(((pool.capacity, pool.slot) for pool in self.full_pools), default=(num_blocks, 0))
        if num_blocks > limits.max_blocks_per_sequence:
            limit = f"a sequence has at most {limits.max_blocks_per_sequence}"
            setting = "give the worker larger blocks (--block-size)"
        elif num_blocks > capacity:
            limit = f"the whole pool{self._of_group(group)} of worker {self.worker_id!r} has {capacity}"
            setting = "give the worker more blocks (--num-blocks, --kv-cache-memory)"
        else:
            limit = f"all workers together may have {budget.max_blocks} blocks and {budget.max_tokens} tokens"
            setting = "raise --max-total-blocks and --max-total-tokens of the manager"
        return Refusal(Reason.NEVER_FITS, f"{needed}; {limit}: {cure}, or {setting}", field=field)

    def _of_group(self, group: int) -> str:
        """For messages: which group, where there are several."""
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
            f"needed {num_blocks} blocks{self._of_group(group)}; worker {self.worker_id!r} has {counts.free} free and "
            f"{num_available - counts.free} evictable of {counts.capacity} ({counts.held} held, {counts.reserved} reserved): wait "
            "until sequences end, or give the worker more blocks (--num-blocks)",
        )

    def __repr__(self) -> str:
        return f"<Session {self.number:#x} of {self.worker_id!r} sequences={len(self.sequences)} {self.counts()}>"


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
        "windows",
    )

    def __init__(self, key: SequenceKey, session: Session, root: Node, tokens: bytes) -> None:
        self.key = key
        self.session = session
        self.root = root
        """Parent of the first node."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and those that Append has stated since."""
        self.tables: tuple[list[int], ...] = ()
        """Block ids from position 0, by group; empty in groups with a window; with cross attention those of the encoder's input.
        Set by who grants them, like `num_named`."""
        self.windows: tuple[WindowTable | None, ...] = ()
        """By group, None for those without a window; empty if no group has one."""
        self.boundaries: tuple[int, ...] = ()
        """In blocks, ascending: where the worker was asked to name windows, as far as it is not known to have computed so far."""
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
        """By group: leading entries of the table that the worker has named or was granted by Allocate."""
        self.encoder_computed = False
        """With cross attention: the KV of the encoder's input is complete."""
        self.fenced = False
        """A larger attempt lives on another session; only Free is accepted."""

    def __repr__(self) -> str:
        key = self.key
        return (
            f"<Sequence {key.sequence_id!r} attempt={key.attempt} round={key.round} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} tables={self.tables} windows={self.windows}"
            f"{' fenced' if self.fenced else ''}>"
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
    def num_slots(self) -> int:
        """Tokens that the shortest of its tables has room for. Without tables of the whole sequence, its tokens."""
        lengths = [len(self.tables[pool.slot]) * self.session.block_size for pool in self.session.full_pools]
        return min(lengths, default=self.num_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds, in all groups."""
        num_in_windows = sum(len(window) for window in self.windows if window is not None)
        return sum(map(len, self.tables)) + num_in_windows

    def blocks(self, group: int) -> list[int]:
        """Those of one group, in no particular order."""
        window = self.windows[group] if self.windows else None
        return self.tables[group] if window is None else window.blocks()

    def block_at(self, group: int, index: int) -> int:
        """The block at a table index; 0 if it has none there."""
        window = self.windows[group] if self.windows else None
        if window is not None:
            return window.entries.get(index, 0)
        table = self.tables[group]
        return table[index] if index < len(table) else 0

    def block_tokens(self, index: int) -> bytes:
        """The tokens of the full block at a table index."""
        step = self.session.block_size * TOKEN_BYTES
        return bytes(self.tokens[index * step : (index + 1) * step])

    def unsealed(self, group: int) -> List[int]:
        """Its blocks of a group that are not sealed, in no particular order."""
        window = self.windows[group] if self.windows else None
        if window is not None:
            return list(window.scratch)
        table, pool = self.tables[group], self.session.unit_pool
        if pool is not None and pool.slot == group:
            return table if pool.node(table[0]) is None else []
        return table[self.num_sealed :]

    def token_count(self, index: int, group: int = 0) -> int:
        """Slots of the block at a table index whose KV is known to be computed."""
        size, pool = self.session.block_size, self.session.unit_pool
        if pool is not None and pool.slot == group:
            return size if self.encoder_computed else 0
        return max(0, min(size, self.num_computed_tokens - index * size))
