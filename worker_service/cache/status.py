"""Reason and numbers of a google.rpc.Status."""

from __future__ import annotations

from google.rpc import error_details_pb2, status_pb2


def reason_of(status: status_pb2.Status) -> str:
    """`ErrorInfo.reason` of a status, e.g. "NO_BLOCKS"; empty if it has none."""
    info = _info(status)
    return "" if info is None else str(info.reason)


def number_of(status: status_pb2.Status, name: str) -> int | None:
    """A number in the metadata of the status's ErrorInfo; None if it has none of that name."""
    info = _info(status)
    text = "" if info is None else info.metadata.get(name, "")
    return int(text) if text.isdecimal() else None


def _info(status: status_pb2.Status) -> error_details_pb2.ErrorInfo | None:
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            return info
    return None
