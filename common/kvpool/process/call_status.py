"""Sets and reads the google.rpc.Status of a gRPC call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from kvpool.protocol.status import Details, read_details

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


def set_status(context: Context, status: status_pb2.Status) -> None:
    """Give the call a status other than OK. Its method must return then; the result is not sent.

    `context.abort_with_status` is not used: the exception that it raises ends in a reference cycle of some 27 objects, which the
    young passes of the collector miss if a pass falls between the call's arrival and its end.
    """
    failure = rpc_status.to_status(status)
    context.set_code(failure.code)
    context.set_details(failure.details)
    context.set_trailing_metadata(failure.trailing_metadata)


def details_of(error: grpc.aio.AioRpcError) -> Details:
    """Return the details of a failed call; they are empty if its status has none."""
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except (ValueError, DecodeError):
        # The details are no Status, or contradict the call's code or message: only those are believed.
        return Details()
    return Details() if status is None else read_details(status)
