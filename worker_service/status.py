"""Maps errors of the engine to the statuses that a client sees, in one table."""

from __future__ import annotations

from typing import NamedTuple

from google.rpc import code_pb2, status_pb2

from kvpool.protocol.status import build_status

from .engine.errors import EngineError, ErrorKind


class _Row(NamedTuple):
    code: int
    retry_seconds: float = 0.0
    """Seconds until a retry, if the error has none; 0: a retry is of no use."""
    bad_request: bool = False


_TABLE = {
    ErrorKind.INVALID: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    ErrorKind.NEVER_FITS: _Row(code_pb2.INVALID_ARGUMENT, bad_request=True),
    ErrorKind.BUSY: _Row(code_pb2.RESOURCE_EXHAUSTED, retry_seconds=1.0),
    ErrorKind.EXISTS: _Row(code_pb2.ALREADY_EXISTS),
    ErrorKind.OTHER_MODEL: _Row(code_pb2.FAILED_PRECONDITION),
    ErrorKind.SUPERSEDED: _Row(code_pb2.FAILED_PRECONDITION),
    ErrorKind.UNAVAILABLE: _Row(code_pb2.UNAVAILABLE, retry_seconds=0.5),
    ErrorKind.DRAINING: _Row(code_pb2.UNAVAILABLE, retry_seconds=0.5),
    ErrorKind.SLOW_READER: _Row(code_pb2.RESOURCE_EXHAUSTED),
    ErrorKind.INTERNAL: _Row(code_pb2.INTERNAL),
}


def of_error(error: EngineError) -> status_pb2.Status:
    """The status of a request that ended with `error`; a refusal of the manager is passed on as it is."""
    if error.status is not None:
        return error.status
    row = _TABLE[error.kind]
    retry_seconds = row.retry_seconds if error.retry_seconds is None else error.retry_seconds
    return build_status(
        row.code,
        error.kind.value,
        error.message,
        retry_seconds=retry_seconds or None,
        bad_field=error.field if row.bad_request else None,
    )
