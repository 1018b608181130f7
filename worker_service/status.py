"""From an error of the engine to the client's status, in one table, and from a manager's error to its reason."""

from __future__ import annotations

from typing import NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from .cache.status import number_of, reason_of
from .engine.errors import EngineError, ErrorKind

DOMAIN = "kvpool"


class _Row(NamedTuple):
    code: int
    retry_seconds: float = 0.0
    """Used if the error has none; 0: a retry is of no use."""
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
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.kind.value, domain=DOMAIN)]
    retry_seconds = row.retry_seconds if error.retry_seconds is None else error.retry_seconds
    if retry_seconds:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(retry_seconds * 1000))
        details.append(retry)
    if row.bad_request:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=row.code, message=error.message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def retry_seconds_of_failure(error: grpc.aio.AioRpcError) -> float:
    """RetryInfo of a failed call; 0 if it has none."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in () if status is None else status.details:
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            return float(info.retry_delay.ToMilliseconds() / 1000)
    return 0.0


def reason_of_failure(error: grpc.aio.AioRpcError) -> str:
    """`ErrorInfo.reason` of a failed call; empty if the error is the transport's."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    return "" if status is None else reason_of(status)


def number_in_failure(error: grpc.aio.AioRpcError, name: str) -> int | None:
    """A number in the metadata of a failed call's ErrorInfo; None if it has none of that name."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    return None if status is None else number_of(status, name)
