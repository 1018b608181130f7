"""A session: one registration of a worker, with its pool, lease, downlink and live sequences."""

from __future__ import annotations

from collections.abc import Sequence as List
from enum import Enum

from .block_pool import BlockPool
from .budget import Account
from .downlink import Downlink
from .messages import TOKEN_BYTES, Drain, Limits, Registration, Root, SequenceKey, WorkerLoad
from .prefix_tree import Node, RootNode
from .refusal import Reason, Refusal
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
        pool: BlockPool,
        account: Account,
        downlink: Downlink,
        lease_end: float,
        most_blocks_per_sequence: int,
        key: SessionKey = NO_KEY,
    ) -> None:
        self.number = number
        self.key = key
        """The secret that every call of the session must carry."""
        self.registration = registration
        self.name = registration.worker_id.encode()
        """The worker's id as bytes, for hashes."""
        self.pool = pool
        self.account = account
        """Its part of the budget of all workers."""
        self.most_blocks_per_sequence = most_blocks_per_sequence
        """Largest table that can ever be granted: the smallest of all limits."""
        self.lease_end = lease_end
        """Monotonic time at which the lease runs out, in seconds."""
        self.registered_at = 0.0
        """Monotonic time of the Register, in seconds."""
        self.last_call_no = 0
        """Number of the last mutating call executed."""
        self.downlink = downlink
        self.sequences: dict[tuple[str, int], Sequence] = {}
        """Live sequences by (sequence_id, attempt)."""
        self.reserve_wish = 0
        """Blocks that the worker wants in its reserve."""
        self.load = WorkerLoad()
        self.recovering = False
        """Its report is not complete: look-ups skip the session, and its other calls are refused."""
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

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.registration.worker_id

    def root_of(self, key: SequenceKey) -> Root | None:
        """The root of a live sequence; None if there is no such sequence."""
        sequence = self.sequences.get((key.sequence_id, key.attempt))
        return sequence.root.key[0] if sequence is not None and isinstance(sequence.root, RootNode) else None

    def never_fits(self, num_blocks: int, limits: Limits, *, needed: str, cure: str, field: str) -> Refusal:
        """The refusal of a table that can never be granted. It names the first limit that `num_blocks` exceeds; `needed` and `cure`
        are what was asked for and what else the worker can do, in words."""
        capacity, budget = self.pool.capacity, self.account.budget
        if num_blocks > limits.max_blocks_per_sequence:
            limit = f"a sequence has at most {limits.max_blocks_per_sequence}"
            setting = "give the worker larger blocks (--block-size)"
        elif num_blocks > capacity:
            limit = f"the whole pool of worker {self.worker_id!r} has {capacity}"
            setting = "give the worker more blocks (--num-blocks, --kv-cache-memory)"
        else:
            limit = f"all workers together may have {budget.max_blocks} blocks and {budget.max_tokens} tokens"
            setting = "raise --max-total-blocks and --max-total-tokens of the manager"
        return Refusal(Reason.NEVER_FITS, f"{needed}; {limit}: {cure}, or {setting}", field=field)

    def require_available(self, num_blocks: int, hits: List[int] = ()) -> None:
        """Raise Refusal (NO_BLOCKS, TOO_MANY_BLOCKS, TOO_MANY_TOKENS) unless `num_blocks` can be granted now while `hits`, which
        may be cached blocks, are pinned."""
        pool = self.pool
        num_available = pool.num_available - pool.num_cached_of(hits)
        if num_blocks <= num_available:
            return
        counts = pool.counts()
        if num_blocks <= num_available + counts.withheld:
            raise self.account.too_many_blocks(num_blocks - num_available + self.account.blocks_left)
        raise Refusal(
            Reason.NO_BLOCKS,
            f"needed {num_blocks} blocks; worker {self.worker_id!r} has {counts.free} free and {num_available - counts.free} "
            f"evictable of {counts.capacity} ({counts.held} held, {counts.reserved} reserved): wait until sequences end, or give "
            "the worker more blocks (--num-blocks)",
        )

    def __repr__(self) -> str:
        return f"<Session {self.number:#x} of {self.worker_id!r} sequences={len(self.sequences)} {self.pool.counts()}>"


class Sequence:
    """One (sequence_id, attempt) on one session, in its current round."""

    __slots__ = (
        "fenced",
        "key",
        "nodes",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_named",
        "num_sealed",
        "root",
        "session",
        "table",
        "tokens",
    )

    def __init__(self, key: SequenceKey, session: Session, root: Node, tokens: bytes) -> None:
        self.key = key
        self.session = session
        self.root = root
        """Parent of the first node."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and those that Append has stated since."""
        self.table: list[int] = []
        """Block ids, from position 0."""
        self.nodes: list[Node] = []
        """Path of the prompt's full blocks, and of others as they are sealed."""
        self.num_sealed = 0
        """Leading blocks of the table that are sealed, hits included."""
        self.num_cached_tokens = 0
        """Tokens served from the cache when the sequence was granted."""
        self.num_computed_tokens = 0
        """Tokens whose KV the worker has reported as completed, hits included."""
        self.num_named = 0
        """Leading entries of the table that the worker has named or was granted by Allocate."""
        self.fenced = False
        """A larger attempt lives on another session; only Free is accepted."""

    def __repr__(self) -> str:
        key = self.key
        return (
            f"<Sequence {key.sequence_id!r} attempt={key.attempt} round={key.round} tokens={self.num_tokens} "
            f"computed={self.num_computed_tokens} table={self.table}{' fenced' if self.fenced else ''}>"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def pool(self) -> BlockPool:
        """The pool that its table's blocks belong to."""
        return self.session.pool

    def block_tokens(self, index: int) -> bytes:
        """The tokens of the full block at a table index."""
        step = self.pool.block_size * TOKEN_BYTES
        return bytes(self.tokens[index * step : (index + 1) * step])

    def token_count(self, index: int) -> int:
        """Slots of the block at a table index whose KV is known to be computed."""
        size = self.pool.block_size
        return max(0, min(size, self.num_computed_tokens - index * size))
