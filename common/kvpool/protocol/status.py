"""Builds and reads google.rpc.Status, for whole calls and for items of a batch. The table of reasons is in cache.proto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN: Final = "kvpool"
"""`ErrorInfo.domain` of every status that a kvpool service sends."""

MAX_TEXT_BYTES: Final = 1000
"""Longest message of a status. A failed call's status travels twice in HTTP headers, of which peers take 8 KiB, and a message may
quote the peer."""


def build_status(
    code: int,
    reason: str,
    message: str,
    *,
    metadata: Mapping[str, str] | None = None,
    retry_seconds: float | None = None,
    quota: str = "",
    bad_field: str | None = None,
) -> status_pb2.Status:
    """Build a status with ErrorInfo, with RetryInfo if there is a time to wait, QuotaFailure if a `quota` is used up, and
    BadRequest if a field is wrong. A message longer than MAX_TEXT_BYTES loses its middle."""
    message = _clip(message)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)]
    if retry_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if quota:
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=quota, description=message)
        details.append(failure)
    if bad_field is not None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=bad_field, description=message)
        details.append(bad)
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


@dataclass(frozen=True, slots=True)
class Details:
    """The details of a status, for programs. Empty if the transport answered in place of a kvpool service."""

    reason: str = ""
    """`ErrorInfo.reason`, e.g. NO_BLOCKS."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`ErrorInfo.metadata`."""
    retry_seconds: float | None = None
    """Time after which the same request may succeed; None: unknown."""
    violations: tuple[str, ...] = ()
    """`field: what is wrong with it`, one for each bad field or used-up quota."""

    def number(self, name: str) -> int | None:
        """Return a number in the metadata; None if there is none of that name."""
        text = self.metadata.get(name, "")
        return int(text) if text.isdecimal() else None


def read_details(status: status_pb2.Status) -> Details:
    """Read the details of known types. An ErrorInfo of another domain, e.g. a proxy's, is ignored."""
    reason = ""
    metadata: dict[str, str] = {}
    retry_seconds: float | None = None
    violations: list[str] = []
    for detail in status.details:
        info = _unpacked(detail, error_details_pb2.ErrorInfo())
        if info is not None and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        retry = _unpacked(detail, error_details_pb2.RetryInfo())
        if retry is not None:
            retry_seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        bad = _unpacked(detail, error_details_pb2.BadRequest())
        if bad is not None:
            violations += [f"{violation.field}: {violation.description}" for violation in bad.field_violations]
        quota = _unpacked(detail, error_details_pb2.QuotaFailure())
        if quota is not None:
            violations += [f"{violation.subject}: {violation.description}" for violation in quota.violations]
    return Details(reason, metadata, retry_seconds, tuple(violations))


def reason_of(status: status_pb2.Status) -> str:
    """Return the `ErrorInfo.reason` of a status, e.g. "NO_BLOCKS"; empty if it has none."""
    return read_details(status).reason


def _unpacked(detail: any_pb2.Any, message: Any) -> Any:
    """Return the detail as a message of that type; None if it has another type or cannot be parsed."""
    try:
        return message if detail.Unpack(message) else None
    except DecodeError:
        return None


def _clip(message: str) -> str:
    data = message.encode(errors="replace")
    if len(data) <= MAX_TEXT_BYTES:
        return message
    half = MAX_TEXT_BYTES // 2 - 4
    return f"{data[:half].decode(errors='ignore')} … {data[-half:].decode(errors='ignore')}"
