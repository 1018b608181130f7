"""Whose contents are taken in: a few reports at the same time, and each of the others after a bounded time.

A report that states contents has a *turn*. A turn ends with the report; while another report waits it also ends after a lease
without a part, and after some leases in any case, or a report that never ends would keep all others out. A report that has lost its
turn keeps what it has stated, and asks for another turn at the end of the queue. So a report that goes on asking waits at most for
one turn of each report that asked before it, divided by the number of turns at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_LEASES: Final = 4
"""Length of a turn that another report waits for, in leases, however fast its parts come."""


@dataclass(slots=True)
class _Turn:
    began_at: float
    part_at: float
    """When its last part came."""


class ReportTurns:
    """The turns of one manager. Reports are named by their sessions; times are monotonic seconds."""

    def __init__(self, max_at_once: int, lease_seconds: float) -> None:
        self._max_at_once = max_at_once
        self._lease_seconds = lease_seconds
        self._turns: dict[int, _Turn] = {}
        self._waiting: dict[int, float] = {}
        """When each report that waits last asked; the one that waits longest first."""

    def ask(self, session: int, now: float) -> bool:
        """Whether a report may state contents now. One that may not waits, as long as it asks again within a lease."""
        if session not in self._turns:
            self._waiting[session] = now  # an entry that is there keeps its place
        self._forget_the_late(now)
        if self._waiting:
            self._end_turns(now)
        if session in self._turns:
            self._turns[session].part_at = now
            return True
        self._waiting[session] = now
        if list(self._waiting).index(session) >= self._max_at_once - len(self._turns):
            return False
        del self._waiting[session]
        self._turns[session] = _Turn(now, now)
        return True

    def _forget_the_late(self, now: float) -> None:
        for session, asked_at in list(self._waiting.items()):
            if now - asked_at > self._lease_seconds:
                del self._waiting[session]

    def _end_turns(self, now: float) -> None:
        """Those that are over when others wait."""
        for session, turn in list(self._turns.items()):
            if now - turn.part_at > self._lease_seconds or now - turn.began_at > MOST_LEASES * self._lease_seconds:
                del self._turns[session]

    def end(self, session: int) -> None:
        """The report is complete, or its session has ended. Idempotent."""
        self._turns.pop(session, None)
        self._waiting.pop(session, None)
