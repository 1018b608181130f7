"""What a call that has failed says: the rich status of its trailing metadata, and its details."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

Detail = TypeVar("Detail", bound=Message)


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The rich status; empty where the transport has answered."""
    return rpc_status.from_call(error) or status_pb2.Status()  # type: ignore[arg-type]


def detail(status: status_pb2.Status, kind: type[Detail]) -> Detail:
    """The one detail of a kind that a status has."""
    found = kind()
    (packed,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    packed.Unpack(found)
    return found


def reason_of(status: status_pb2.Status) -> str:
    """The ErrorInfo's reason, whose domain must be ours; empty if the status has no details."""
    if not status.details:
        return ""
    info = detail(status, error_details_pb2.ErrorInfo)
    assert info.domain == "kvpool"
    return str(info.reason)


def position_of(status: status_pb2.Status) -> int:
    """The position that a GAP or TOKENS_DIFFER names."""
    return int(detail(status, error_details_pb2.ErrorInfo).metadata["position"])


def field_of(status: status_pb2.Status) -> str:
    """The one field that a bad request names."""
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    return str(violation.field)
