"""The worker's end of the link: session, call numbers, the one mutating call in flight, and the downlink read so far.

No I/O: EngineCache decides what to send, the edge sends it and passes the outcome back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpool.v1 import cache_pb2, common_pb2

from .entry import add_spare
from .groups.group import Statement
from .reserve import SpareBlock
from .sequence import CacheSequence

if TYPE_CHECKING:
    from .report import Report

SESSION_OVER = {
    "STALE_SESSION": "the manager no longer knows this session",
    "WRONG_KEY": "the manager knows this session under another key",
}
"""Reasons after which the worker registers again, in words."""
MAX_STALE_CALLS = 3
"""STALE_CALLs in a row after which the session is given up: a sender with its key has used the numbers."""
BACKOFF_FIRST_SECONDS = 0.05
BACKOFF_MOST_SECONDS = 0.25


Returned = tuple[tuple[SpareBlock, ...], ...]
"""Surplus of the reserves, by group."""


Request = (
    cache_pb2.AllocateRequest
    | cache_pb2.AppendRequest
    | cache_pb2.ForkRequest
    | cache_pb2.FreeRequest
    | cache_pb2.ReportRequest
)


class Stated(NamedTuple):
    """What a call stated of one sequence, to be marked as acknowledged once the call is executed."""

    sequence: CacheSequence
    num_tokens: int
    num_computed_tokens: int
    prompt: bytes = b""
    """Tokens of an Allocate as in the message; empty for other calls."""
    statements: tuple[Statement, ...] = ()
    """What was stated of each group; empty for an Allocate."""


@dataclass(frozen=True, eq=False, slots=True)
class MutatingCall:
    """One mutating call, to be sent now. Pass the reply to `EngineCache.on_reply`, a failure to `on_failure`."""

    request: Request
    stated: tuple[Stated, ...]
    returned: Returned

    @property
    def is_report(self) -> bool:
        return isinstance(self.request, cache_pb2.ReportRequest)


class LinkState:
    """State of one session's link. A new session starts with a new LinkState."""

    def __init__(self, session: int, key: bytes = b"") -> None:
        self.session = session
        self.key = key
        """The session's secret, which every call carries."""
        self.in_flight: MutatingCall | None = None
        self.report: Report | None = None
        """The report to send: before any other call until it is live, then between other calls; None: it is complete, or the
        manager wants none."""
        self.retry_at = 0.0
        """No call before this time, in monotonic seconds."""
        self.applied_number = 0
        """Number of the last downlink entry applied."""
        self.heard_heartbeat = 0
        """Number of the last heartbeat whose answer was received."""
        self.num_calls = 0
        """Mutating calls sent in this session."""
        self.num_stale_calls = 0
        """Calls answered STALE_CALL since the last one that was executed."""
        self._backoff = BACKOFF_FIRST_SECONDS

    def uplink(self, reserve_wishes: Iterable[int], returned: Returned) -> cache_pb2.Uplink:
        """The head of the next mutating call, under the next number. `reserve_wishes`: blocks wanted in the reserve of each
        group."""
        self.num_calls += 1
        uplink = cache_pb2.Uplink(
            session=self.session, session_key=self.key, call_no=self.num_calls, downlink_ack=self.applied_number
        )
        for group, wish in enumerate(reserve_wishes):
            uplink.reserve_wishes.add(group=group, tier=common_pb2.TIER_DEVICE, num_blocks=wish)
        for group, blocks in enumerate(returned):
            add_spare(uplink.returned, group, blocks)
        return uplink

    def new_entries(self, downlink: cache_pb2.Downlink) -> list[cache_pb2.DownlinkEntry]:
        """The entries not applied yet, in order; from now on they count as applied."""
        entries = [entry for entry in downlink.entries if entry.number > self.applied_number]
        if entries:
            self.applied_number = entries[-1].number
        return entries

    @property
    def is_live(self) -> bool:
        """Whether the manager knows all that is in use here, and serves the session."""
        return self.report is None or self.report.is_live

    @property
    def is_unanswered(self) -> bool:
        """Whether the last call got no answer: the manager may be away."""
        return self._backoff > BACKOFF_FIRST_SECONDS

    def succeeded(self) -> None:
        self.in_flight = None
        self.num_stale_calls = 0
        self._backoff = BACKOFF_FIRST_SECONDS

    def failed(self, now: float) -> None:
        """The call in flight is given up. The wait before the next one doubles each time."""
        self.in_flight = None
        self.retry_at = now + self._backoff
        self._backoff = min(self._backoff * 2, BACKOFF_MOST_SECONDS)
