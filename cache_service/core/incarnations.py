"""Which process may speak for a worker: one at a time.

Each process of a worker names an *incarnation*, larger than that of the process before it, and a random *process key*. A process
that was started in place of another one also names the key of that one, which it found in the worker's state folder, whose lock
it holds: so the other has ended.

| the Register names | a session of the worker lives | no session lives |
|---|---|---|
| the process known, a larger register_no | begins the next session | begins a session |
| the process known, no larger register_no | STALE_REGISTER | STALE_REGISTER |
| a newer incarnation and the key of the process that lives | fences it | begins a session |
| a newer incarnation | WORKER_ELSEWHERE until its lease has ended | begins a session |
| an older incarnation, or the same with another key | STALE_INCARNATION | STALE_INCARNATION until a lease after the end |

An incarnation orders processes; it need not be a time. The last row lets a worker return whose clock was set back and whose state
folder was lost. It is safe because blocks belong to sessions, not to names: calls of the newer process that are still in flight
name a session that has ended, and the older one must report what it holds like any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from typing import NamedTuple

from .messages import Registration
from .refusal import Reason, Refusal, bad_field
from .session import Session

MAX_FIRST_REGISTER_NO = 1 << 63
"""The largest register_no of a process that is not known: a restarted manager takes it from one that has tried for long."""


class Known(NamedTuple):
    """The process that began the last session of a worker, live or not."""

    incarnation: int
    register_no: int
    process_key: bytes
    expires_at: float = 0.0
    """Monotonic time in seconds from which an older incarnation is accepted, if no session lives."""


class Incarnations:
    """The last process of each worker that had a session. Times are seconds of one monotonic clock."""

    def __init__(self, lease_seconds: float, max_known: int, max_numbers_skipped: int) -> None:
        """`max_known`: how many workers are remembered; those without a session are forgotten first, the oldest first.
        `max_numbers_skipped`: how far a register_no may be above the last one."""
        self._lease_seconds = lease_seconds
        self._max_known = max_known
        self._max_numbers_skipped = max_numbers_skipped
        self._known: OrderedDict[str, Known] = OrderedDict()

    @property
    def known(self) -> dict[str, Known]:
        """The last process of each worker, by worker_id; a copy."""
        return dict(self._known)

    def require_turn(self, registration: Registration, live: Session | None, now: float) -> None:
        """Refuse a process that may not begin a session. `live`: the worker's session, if one lives. Changes nothing.

        Raises Refusal: STALE_INCARNATION, STALE_REGISTER, WORKER_ELSEWHERE, BAD_FIELD (register_no).
        """
        known = self._known.get(registration.worker_id)
        incarnation, worker_id = registration.incarnation, registration.worker_id
        most = MAX_FIRST_REGISTER_NO
        if known is None:
            pass
        elif (incarnation, registration.process_key) == (known.incarnation, known.process_key):
            most = max(most, known.register_no + self._max_numbers_skipped)
            if registration.register_no <= known.register_no:
                raise Refusal(
                    Reason.STALE_REGISTER,
                    f"register_no {registration.register_no} of worker {worker_id!r} was overtaken by {known.register_no}: "
                    "register again with a larger one",
                    metadata={"register_no": str(known.register_no)},
                )
        elif incarnation > known.incarnation:
            if live is not None and not _replaces(registration, known):
                wait = max(0.0, live.lease_end - now)
                raise Refusal(
                    Reason.WORKER_ELSEWHERE,
                    f"another process has the worker_id {worker_id!r}: incarnation {known.incarnation} at "
                    f"{live.registration.address!r}, whose lease ends in {wait:.1f} s unless it is renewed. {_cures(wait)}",
                    retry_seconds=wait,
                )
        else:
            ends_at = known.expires_at if live is None else live.lease_end + self._lease_seconds
            # A session lives until a tick ends it: after a gap its lease may seem to be over, while its KeepAlive waits to be read.
            if live is not None or now < ends_at:
                wait = max(0.0, ends_at - now)
                raise Refusal(
                    Reason.STALE_INCARNATION,
                    f"worker {worker_id!r} is known with incarnation {known.incarnation}, and that of this process, {incarnation}, "
                    f"is not newer: two processes use the same worker_id, or the clock was set back. {_cures(wait)}",
                    retry_seconds=wait,
                    metadata={"incarnation": str(known.incarnation)},
                )
        if registration.register_no > most:
            raise bad_field("register_no", f"at most {most}, got {registration.register_no}: count up by one")

    def remember(self, registration: Registration, live: Container[str]) -> None:
        """A process has begun a session. `live`: workers that have one, which are never forgotten."""
        known = self._known
        worker_id = registration.worker_id
        known[worker_id] = Known(registration.incarnation, registration.register_no, registration.process_key)
        known.move_to_end(worker_id)
        while len(known) > self._max_known:
            del known[next(name for name in known if name not in live)]

    def on_end(self, session: Session) -> None:
        """A session has ended. Its last lease ends by now or later, so a lease after that is at least a lease from now."""
        known = self._known.get(session.worker_id)
        if known is not None:
            self._known[session.worker_id] = known._replace(expires_at=session.lease_end + self._lease_seconds)


def _replaces(registration: Registration, known: Known) -> bool:
    return bool(known.process_key) and registration.predecessor_key == known.process_key


def _cures(wait: float) -> str:
    return (
        f"Ask again in {wait:.1f} s, which helps if the other process has ended; or stop that process, give this one another "
        "--worker-id, or restart the manager"
    )
