"""What the cache side tells the engine."""

from __future__ import annotations

from typing import NamedTuple

from google.rpc import status_pb2

from .sequence import CacheSequence


class Granted(NamedTuple):
    """The sequence has its block table and is live."""

    sequence: CacheSequence


class Refused(NamedTuple):
    """The manager will not grant the sequence; it holds nothing and has ended."""

    sequence: CacheSequence
    status: status_pb2.Status


class Stopped(NamedTuple):
    """The sequence lives elsewhere under a larger attempt: end its stream and free it."""

    sequence: CacheSequence


class DrainAsked(NamedTuple):
    """Take no further requests, end the running ones within the grace, free everything and leave."""

    grace_seconds: float | None
    """None: as long as the worker's own settings say."""


class SessionLost(NamedTuple):
    """The manager no longer knows this session, or disagrees with this worker. Everything goes on; the next session begins with a
    report."""

    why: str


class GivenUp(NamedTuple):
    """What is held here cannot be kept: end all streams, then `reset`."""

    why: str
    is_defect: bool = True
    """The manager and this worker contradict each other, which should not happen; else the manager has lost its state."""


Event = Granted | Refused | Stopped | DrainAsked | SessionLost | GivenUp
