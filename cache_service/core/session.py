"""One registration of a worker: its pool, its live sequences, its lease and its numbered downlink."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from .block_pool import BlockPool
from .budget import Account
from .downlink import Downlink
from .messages import TOKEN_BYTES, Drain, Limits, Registration, SequenceKey, WorkerLoad
from .prefix_tree import Node
from .session_key import NO_KEY, SessionKey


class SessionEnd(Enum):
    """Why a session is over."""

    EXPIRED = "expired"
    """Its lease ran out."""
    FENCED = "fenced"
    """Its worker registered anew."""
    DEREGISTERED = "deregistered"
    BAD_REPORT = "bad_report"
    OVER_BUDGET = "over_budget"
    """Its report was of more than the manager may keep."""
    REPLY_TOO_LARGE = "reply_too_large"
    """It asked for an answer that cannot be sent."""
    EPOCH_RAISED = "epoch_raised"
    """The manager goes on under a larger epoch, and all register again."""


class LimitExceeded(NamedTuple):
    """In words: what there is, and what to change."""

    there: str
    cure: str


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
        """What every call of the session must carry."""
        self.registration = registration
        self.name = registration.worker_id.encode()
        """The worker's id as bytes, for hashes."""
        self.pool = pool
        self.account = account
        """What it has of the budget of all workers."""
        self.most_blocks_per_sequence = most_blocks_per_sequence
        """Of a sequence that could ever be granted: the smallest of all limits."""
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
        """Its report is not complete yet; until then look-ups and calls pass the session by."""
        self.num_report_parts = 0
        """Parts of the report that this session began with, once it is complete."""
        self.num_blockless_contents = 0
        """Contents that this report has brought without a block; they count against the budget as blocks do."""
        self.draining = False
        """The worker takes no further requests: it was told so, or has said so."""
        self.drain: Drain | None = None
        """The order that was given, if one was."""
        self.num_calls = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        """Tokens that Append and Free have stated behind what was allocated."""

    @property
    def worker_id(self) -> str:
        """Name of the worker."""
        return self.registration.worker_id

    def limit_exceeded(self, num_blocks: int, limits: Limits) -> LimitExceeded:
        """The smallest limit that a sequence of so many blocks, or of too many tokens, can never be within."""
        capacity, budget = self.pool.capacity, self.account.budget
        if num_blocks > limits.max_blocks_per_sequence:
            return LimitExceeded(
                f"a sequence has at most {limits.max_blocks_per_sequence}",
                "give the worker larger blocks (--block-size)",
            )
        if num_blocks > capacity:
            return LimitExceeded(
                f"the whole pool of worker {self.worker_id!r} has {capacity}",
                "give the worker more blocks (--num-blocks, --kv-cache-memory)",
            )
        return LimitExceeded(
            f"all workers together may have {budget.max_blocks} blocks and {budget.max_tokens} tokens",
            "raise --max-total-blocks and --max-total-tokens of the manager",
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
        """Root node that `nodes` hang from."""
        self.tokens = bytearray(tokens)
        """All tokens known: the prompt and what Append has told since."""
        self.table: list[int] = []
        """Block ids, from position 0."""
        self.nodes: list[Node] = []
        """Path of the full blocks known: those of the prompt, and further ones as they are sealed."""
        self.num_sealed = 0
        """Leading blocks of the table that are sealed, hits included."""
        self.num_cached_tokens = 0
        """Tokens served from the cache when the sequence was granted."""
        self.num_computed_tokens = 0
        """Tokens whose KV the worker has reported as completed, hits included."""
        self.num_named = 0
        """Leading entries of the table that the worker is known to know."""
        self.fenced = False
        """A larger attempt lives elsewhere; only Free is still accepted."""

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
