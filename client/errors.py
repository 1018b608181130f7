"""The exceptions of the client: the inverse of the table at the top of protos/kvpool/v1/cache.proto."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import grpc
import grpc.aio
from google.rpc import status_pb2

from kvpool.process.call_status import details_of
from kvpool.process.printable import printable
from kvpool.protocol.status import Details, read_details

_LINE_ENDS: Final = re.compile(r"\s*[\r\n]\s*")


class KvpoolError(Exception):
    """Base class of all errors that this library raises on purpose. `str(error)` says what was needed and what to change."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after: float | None = None,
        metadata: Mapping[str, str] | None = None,
        violations: tuple[str, ...] = (),
    ) -> None:
        # Most messages quote a peer; code that shows or logs one should not need to escape it.
        message = printable(_LINE_ENDS.sub(" ", message))
        super().__init__(message)
        self.message: Final = message
        """The sentence for people, one line without control characters."""
        self.reason: Final = reason
        """The word for programs, e.g. NO_BLOCKS; empty if the transport answered instead of a kvpool service."""
        self.retry_after: Final = retry_after
        """Seconds after which the same request may succeed; None: the service gives no time."""
        self.metadata: Final[Mapping[str, str]] = dict(metadata or {})
        """The other figures of the service's ErrorInfo."""
        self.violations: Final = tuple(printable(violation) for violation in violations)
        """`field: what is wrong with it`, one for each bad field or exhausted quota."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, reason={self.reason!r}, retry_after={self.retry_after})"


class InvalidRequest(KvpoolError):
    """The request can never succeed as it is: a bad field, or more than the worker can ever hold."""


class NotFound(KvpoolError):
    """The request names something that does not exist, e.g. a model that no live worker serves."""


class AlreadyExists(KvpoolError):
    """A stream for the same sequence and attempt exists already."""


class ResourceExhausted(KvpoolError):
    """Blocks, places or a quota are used up now. `retry_after` says when to ask again, if that is known."""


class FailedPrecondition(KvpoolError):
    """The request assumes something that no longer holds (attempt, session, model): never repeat it as it is."""


class Aborted(KvpoolError):
    """The request does not continue from the state that the service has."""


class Unavailable(KvpoolError):
    """The service is absent, starts, drains or recovers; another one, or a later try, may answer."""


class DeadlineExceeded(KvpoolError):
    """The time-out passed. The request may have taken effect all the same."""


class Cancelled(KvpoolError):
    """The call was ended before its result was complete."""


class Unimplemented(KvpoolError):
    """The service does not know this call: its version differs from this client's."""


class PermissionDenied(KvpoolError):
    """The service refuses this client."""


class ServiceError(KvpoolError):
    """The service failed without an explanation: this is a defect to report."""


class ProtocolError(KvpoolError):
    """The service's answer breaks the protocol, e.g. a wrong digest, tokens out of order, an end without a reason."""


_EXCEPTIONS: Final[Mapping[grpc.StatusCode, type[KvpoolError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDenied,
}


_CODES: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def from_rpc_error(error: grpc.aio.AioRpcError, who: str) -> KvpoolError:
    """Return the exception for a failed call to `who`: ServiceError for INTERNAL and all codes outside the table."""
    return _exception(error.code(), error.details() or error.code().name, details_of(error), who)


def from_status(status: status_pb2.Status, who: str) -> KvpoolError:
    """Return the exception for a request to `who` that failed in a call that it shared with others."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _exception(code, status.message or code.name, read_details(status), who)


def _exception(code: grpc.StatusCode, details: str, info: Details, who: str) -> KvpoolError:
    exception = _EXCEPTIONS.get(code, ServiceError)
    if exception is Cancelled and not info.reason:
        # A call that we cancel raises asyncio's CancelledError. This one the transport has dropped before its service saw it, as
        # gRPC does when very many are waiting.
        exception = Unavailable
    if exception is Unimplemented and not info.reason:
        details = (
            f"it does not know this call ({details}): is this the address of another service, or of another version?"
        )
    if exception is Unavailable and not info.reason:
        # The transport's own words ("Stream removed (Socket closed)") do not say whose fault it is.
        details = f"not there, or gone ({details})"
    return exception(
        f"{who}: {details}",
        reason=info.reason,
        retry_after=info.retry_seconds,
        metadata=info.metadata,
        violations=info.violations,
    )
