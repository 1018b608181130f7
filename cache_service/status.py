"""The one table from a refusal of the core to the status that a peer sees, for items of a batch and for whole calls.

The table itself is published at the top of cache.proto; the client and the worker have the inverse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from .core.refusal import Reason, Refusal

DOMAIN = "kvpool"
"""`ErrorInfo.domain` of every status."""

MAX_MESSAGE_BYTES = 1000
"""A failed call's status travels twice in HTTP headers, of which peers take 8 KiB; messages can quote what the peer sent."""

INTERNAL = "INTERNAL"
"""`ErrorInfo.reason` of a bug."""


class _Row(NamedTuple):
    code: int
    retry_seconds: float = 0.0
    """Adds RetryInfo: how long to wait before asking again, unless the refusal itself says it."""
    quota: str = ""
    """Adds QuotaFailure: the limit that was reached."""
    bad_request: bool = False
    """Adds BadRequest with the refusal's field."""


_TABLE: Mapping[Reason, _Row] = {
    Reason.BAD_FIELD: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    Reason.NEVER_FITS: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    Reason.NO_BLOCKS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=0.1),
    Reason.NOT_TRIED: _Row(code_pb2.ABORTED),
    Reason.TOO_MANY_SEQUENCES: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=1.0, quota="sequences per worker"),
    Reason.TOO_MANY_WORKERS: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=5.0, quota="workers"),
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


class Unavailable(Exception):
    """The manager cannot serve any call now. Nothing was done."""


def ok() -> status_pb2.Status:
    """The status of an item that was done."""
    return status_pb2.Status()


def of_refusal(refusal: Refusal) -> status_pb2.Status:
    """The status of an item or a call that the core has refused."""
    row = _TABLE[refusal.reason]
    message = _clip(refusal.message)
    details: list[Message] = []
    retry_seconds = row.retry_seconds if refusal.retry_seconds is None else refusal.retry_seconds
    if row.retry_seconds:
        details.append(_retry(retry_seconds))
    if row.quota:
        violation = error_details_pb2.QuotaFailure.Violation(subject=row.quota, description=message)
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if row.bad_request:
        violation = error_details_pb2.BadRequest.FieldViolation(field=refusal.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    metadata = dict(refusal.metadata)
    if refusal.position is not None:
        metadata["position"] = str(refusal.position)
    return _status(row.code, refusal.reason.value, message, details, metadata)


def of_unavailable(error: Unavailable) -> status_pb2.Status:
    """The status of a call that cannot be served now."""
    return _status(code_pb2.UNAVAILABLE, Reason.RECOVERING.value, _clip(str(error)), [_retry(0.5)])


def of_bug() -> status_pb2.Status:
    """The status of a call that ran into a bug. Only the manager's log has the details."""
    return _status(code_pb2.INTERNAL, INTERNAL, "the cache manager failed; its log has the traceback")


def _status(
    code: int,
    reason: str,
    message: str,
    details: list[Message] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=message)
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    for detail in (info, *(details or ())):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _retry(seconds: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(round(seconds * 1000))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _clip(message: str) -> str:
    """The message, its middle left out if it is too long for a header."""
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return message
    half = MAX_MESSAGE_BYTES // 2 - 4
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"
