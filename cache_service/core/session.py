"""One registration of a worker: its pool, its live sequences, its lease and its numbered downlink."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from .block_pool import BlockPool
from .budget import Account
from .messages import DownlinkEntry, Drain, Grant, Limits, Registration, Stop, WorkerLoad
from .sequence import Sequence
from .session_key import NO_KEY, SessionKey

if TYPE_CHECKING:
    from .recovery import Recovery


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


_ENTRY_WEIGHT = 16
"""Of an entry that grants no blocks, in blocks: the id of a sequence is as long."""


def _weight(entry: Grant | Stop | Drain) -> int:
    """Size of an entry in a message, in blocks."""
    return max(len(entry.blocks), 1) if isinstance(entry, Grant) else _ENTRY_WEIGHT


class Downlink:
    """The numbered list of entries that every reply repeats until the worker acknowledges them.

    A reply has entries of `max_blocks` blocks at most, or one that is larger; those after it are held back until some of these
    are acknowledged.
    """

    def __init__(self, max_entries: int, max_blocks: int) -> None:
        self._max_entries = max_entries
        self._max_blocks = max_blocks
        self._entries: list[DownlinkEntry] = []
        self._weight = 0
        self._last_number = 0

    @property
    def is_full(self) -> bool:
        """Whether the worker must acknowledge something before more can be pushed."""
        return len(self._entries) >= self._max_entries

    def push(self, entry: Grant | Stop | Drain) -> None:
        """Append an entry under the next number. The list must not be full, except for the session's one Drain."""
        assert not self.is_full or isinstance(entry, Drain)
        self._last_number += 1
        self._weight += _weight(entry)
        self._entries.append(DownlinkEntry(self._last_number, entry))

    def acknowledge(self, number: int) -> None:
        """Drop entries up to `number`. An old acknowledgement that arrives late drops nothing more."""
        entries = self._entries
        if entries and entries[0].number <= number:
            self._entries = [entry for entry in entries if entry.number > number]
            self._weight = sum(_weight(entry.entry) for entry in self._entries) if self._entries else 0

    @property
    def last_number(self) -> int:
        """Number of the newest entry ever pushed."""
        return self._last_number

    def pending(self) -> tuple[DownlinkEntry, ...]:
        """Entries not acknowledged, oldest first, as many as one reply may have."""
        if self._weight <= self._max_blocks:
            return tuple(self._entries)
        weight = count = 0
        for entry in self._entries:
            weight += _weight(entry.entry)
            if weight > self._max_blocks and count:
                break
            count += 1
        return tuple(self._entries[:count])


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
        self.recovery: Recovery | None = None
        """The report on its way in; until it is complete, look-ups and calls pass the session by."""
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
