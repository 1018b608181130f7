"""The table from refusals of the core to the statuses that peers see, for items of a batch and for whole calls.

The table itself is published at the top of cache.proto; the client and the worker have the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from google.rpc import code_pb2, status_pb2

from kvpool.protocol.status import build_status

from .core.refusal import Reason, Refusal

INTERNAL = "INTERNAL"
"""`ErrorInfo.reason` of a bug."""
STANDBY = "STANDBY"
"""`ErrorInfo.reason` of a call to a process that does not lead."""


class _Row(NamedTuple):
    code: int
    retry_seconds: float = 0.0
    """Adds RetryInfo with the time to wait before asking again, unless the refusal has its own; 0: none."""
    quota: str = ""
    """Adds QuotaFailure with the limit that was reached; empty: none."""
    bad_request: bool = False
    """Adds BadRequest with the refusal's field."""


_TABLE: Mapping[Reason, _Row] = {
    Reason.BAD_FIELD: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    Reason.NEVER_FITS: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    Reason.NO_BLOCKS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=0.1),
    Reason.NOT_TRIED: _Row(code_pb2.ABORTED),
    Reason.TOO_MANY_SEQUENCES: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=1.0, quota="sequences per worker"),
    Reason.TOO_MANY_WORKERS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=5.0, quota="workers"),
    Reason.TOO_MANY_WATCHERS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=5.0, quota="watchers"),
    Reason.TOO_MANY_BLOCKS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=0.5, quota="blocks of all workers"),
    Reason.TOO_MANY_TOKENS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=0.5, quota="tokens of all workers"),
    Reason.UNKNOWN_SEQUENCE: _Row(code_pb2.NOT_FOUND),
    Reason.UNKNOWN_WORKER: _Row(code_pb2.NOT_FOUND),
    Reason.STALE_SESSION: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.WRONG_KEY: _Row(code_pb2.PERMISSION_DENIED),
    Reason.STALE_REGISTER: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.STALE_INCARNATION: _Row(code_pb2.FAILED_PRECONDITION, retry_seconds=1.0),
    Reason.WORKER_ELSEWHERE: _Row(code_pb2.ALREADY_EXISTS, retry_seconds=1.0),
    Reason.FOREIGN_EPOCH: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.STALE_CALL: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.STALE_ATTEMPT: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.STALE_ROUND: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.STALE_GENERATION: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.FREE_FIRST: _Row(code_pb2.FAILED_PRECONDITION),
    Reason.SEQUENCE_ELSEWHERE: _Row(code_pb2.ALREADY_EXISTS),
    Reason.TOKENS_DIFFER: _Row(code_pb2.ABORTED),
    Reason.GAP: _Row(code_pb2.ABORTED),
    Reason.BAD_REPORT: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    Reason.RECOVERING: _Row(code_pb2.UNAVAILABLE, retry_seconds=0.2),
    Reason.UNSUPPORTED: _Row(code_pb2.UNIMPLEMENTED),
}
assert _TABLE.keys() == set(Reason), "every reason has its status"


class ManagerUnavailable(Exception):
    """The manager cannot serve any call now. Nothing was done."""


class LeadsNoLonger(ManagerUnavailable):
    """Another manager may lead by now."""

    def __init__(self) -> None:
        super().__init__("this manager leads no longer: another one may, with larger epochs")


def ok() -> status_pb2.Status:
    """Return the status of an item that was executed."""
    return status_pb2.Status()


def of_refusal(refusal: Refusal) -> status_pb2.Status:
    """Return the status of an item or a call that the core has refused."""
    row = _TABLE[refusal.reason]
    retry_seconds = row.retry_seconds if refusal.retry_seconds is None else refusal.retry_seconds
    metadata = dict(refusal.metadata)
    if refusal.position is not None:
        metadata["position"] = str(refusal.position)
    return build_status(
        row.code,
        refusal.reason.value,
        refusal.message,
        metadata=metadata,
        retry_seconds=retry_seconds if row.retry_seconds else None,
        quota=row.quota,
        bad_field=refusal.field if row.bad_request else None,
    )


def of_unavailable(error: ManagerUnavailable) -> status_pb2.Status:
    """Return the status of a call that cannot be served now."""
    if isinstance(error, LeadsNoLonger):
        return build_status(code_pb2.UNAVAILABLE, STANDBY, str(error), retry_seconds=0.1)
    return build_status(code_pb2.UNAVAILABLE, Reason.RECOVERING.value, str(error), retry_seconds=0.5)


def of_standby() -> status_pb2.Status:
    """Return the status of every call to a process that stands by."""
    return build_status(
        code_pb2.UNAVAILABLE,
        STANDBY,
        "this manager stands by, because another one leads: name the addresses of all managers, --manager HOST:PORT,HOST:PORT",
        retry_seconds=0.1,
    )


def of_bug() -> status_pb2.Status:
    """Return the status of a call that ran into a bug. Only the manager's log says what happened."""
    return build_status(code_pb2.INTERNAL, INTERNAL, "the cache manager failed; its log has the traceback")
