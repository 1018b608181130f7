"""Why the engine ends a stream or refuses a request. The edge maps each kind to a status."""

from __future__ import annotations

from enum import Enum

from google.rpc import status_pb2


class ErrorKind(Enum):
    """What went wrong, as the caller sees it."""

    INVALID = "BAD_FIELD"
    NEVER_FITS = "NEVER_FITS"
    BUSY = "QUEUE_FULL"
    EXISTS = "STREAM_EXISTS"
    OTHER_MODEL = "OTHER_MODEL"
    SUPERSEDED = "STALE_ATTEMPT"
    UNAVAILABLE = "RECOVERING"
    DRAINING = "DRAINING"
    SLOW_READER = "SLOW_READER"
    REFUSED = "REFUSED"
    INTERNAL = "INTERNAL"


class EngineError(Exception):
    """A request that cannot be served. `field`: the offending one. `status`: the manager's own answer, if it refused.
    `retry_seconds`: when to try again, if more is known than follows from the kind."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        field: str = "",
        status: status_pb2.Status | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.field = field
        self.status = status
        self.retry_seconds = retry_seconds


def never_fits(field: str, message: str) -> EngineError:
    return EngineError(ErrorKind.NEVER_FITS, message, field=field)


def invalid(field: str, message: str) -> EngineError:
    return EngineError(ErrorKind.INVALID, f"{field}: {message}", field=field)
