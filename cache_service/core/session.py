"""A session: one registration of a worker, with its groups, lease, downlink and live sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from enum import Enum

from .budget import Account
from .downlink import Downlink
from .groups.group import SessionGroup
from .messages import BlockCounts, Drain, Limits, Registration, Root, SequenceKey, WorkerLoad
from .refusal import Reason, Refusal, bad_field
from .sequence import Sequence
from .session_key import NO_KEY, SessionKey


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


class Session:
    """A worker's registration, from Register until it is fenced, expires or deregisters."""

    def __init__(
        self,
        number: int,
        registration: Registration,
        groups: tuple[SessionGroup, ...],
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
        self.longest_input = max(group.longest_input for group in groups)
        """Tokens of the longest encoder's input that can be served; 0 without an encoder."""
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
        return None if sequence is None else sequence.root.key[0]

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
