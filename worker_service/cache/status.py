"""Reading the manager's answers: the reason inside a google.rpc.Status."""

from __future__ import annotations

from google.rpc import error_details_pb2, status_pb2


def reason_of(status: status_pb2.Status) -> str:
    """`ErrorInfo.reason` of a status, e.g. "NO_BLOCKS"; empty if it has none."""
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            return str(info.reason)
    return ""
