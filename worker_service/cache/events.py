"""Events of the cache side, for the engine."""

from __future__ import annotations

from typing import NamedTuple

from google.rpc import status_pb2

from .sequence import CacheSequence


class TableGranted(NamedTuple):
    """The sequence has its block table and is live."""

    sequence: CacheSequence


class Refused(NamedTuple):
    """The manager has refused the sequence for good: end its stream."""

    sequence: CacheSequence
    status: status_pb2.Status


class Stopped(NamedTuple):
    """The sequence continues on another worker under a larger attempt: end its stream and free it."""

    sequence: CacheSequence


class DrainAsked(NamedTuple):
    """Refuse new requests, end the running ones within the grace, free everything and leave."""

    grace_seconds: float | None
    """None: the worker's own setting."""


class SessionLost(NamedTuple):
    """The manager no longer knows this session, or disagrees with this worker. Requests continue; the next session starts with a
    report."""

    why: str


class GivenUp(NamedTuple):
    """The blocks held here cannot be kept: end all streams, then `reset`."""

    why: str
    is_defect: bool = True
    """The manager and this worker contradict each other; else the manager has lost its state."""


Event = TableGranted | Refused | Stopped | DrainAsked | SessionLost | GivenUp
