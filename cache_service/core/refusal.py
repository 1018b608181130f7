"""Refusals of the core: one exception and a closed list of reasons, each of which the edge maps to a status."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Reason(Enum):
    """The `ErrorInfo.reason` of a refusal. Nothing has changed when it is raised."""

    BAD_FIELD = "BAD_FIELD"
    NEVER_FITS = "NEVER_FITS"
    NO_BLOCKS = "NO_BLOCKS"
    NOT_TRIED = "NOT_TRIED"
    TOO_MANY_SEQUENCES = "TOO_MANY_SEQUENCES"
    TOO_MANY_WORKERS = "TOO_MANY_WORKERS"
    TOO_MANY_WATCHERS = "TOO_MANY_WATCHERS"
    TOO_MANY_BLOCKS = "TOO_MANY_BLOCKS"
    TOO_MANY_TOKENS = "TOO_MANY_TOKENS"
    UNKNOWN_SEQUENCE = "UNKNOWN_SEQUENCE"
    UNKNOWN_WORKER = "UNKNOWN_WORKER"
    STALE_SESSION = "STALE_SESSION"
    WRONG_KEY = "WRONG_KEY"
    STALE_REGISTER = "STALE_REGISTER"
    STALE_INCARNATION = "STALE_INCARNATION"
    WORKER_ELSEWHERE = "WORKER_ELSEWHERE"
    FOREIGN_EPOCH = "FOREIGN_EPOCH"
    STALE_CALL = "STALE_CALL"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    STALE_ROUND = "STALE_ROUND"
    STALE_GENERATION = "STALE_GENERATION"
    FREE_FIRST = "FREE_FIRST"
    SEQUENCE_ELSEWHERE = "SEQUENCE_ELSEWHERE"
    TOKENS_DIFFER = "TOKENS_DIFFER"
    GAP = "GAP"
    BAD_REPORT = "BAD_REPORT"
    RECOVERING = "RECOVERING"
    UNSUPPORTED = "UNSUPPORTED"


class Refusal(Exception):
    """A request that the core has refused. Nothing has changed.

    `message` says what was needed, what there is and what to change. `field` names the offending field of a bad request;
    `position` is the token position needed after GAP and TOKENS_DIFFER. `retry_seconds` is how long to wait before asking again,
    where the reason alone does not say it. `metadata` is what else a program may want to know, by name.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        position: int | None = None,
        retry_seconds: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.position = position
        self.retry_seconds = retry_seconds
        self.metadata = dict(metadata or {})

    def __repr__(self) -> str:
        return f"Refusal({self.reason.value}: {self.message})"


def bad_field(field: str, message: str) -> Refusal:
    """A BAD_FIELD refusal for `field`."""
    return Refusal(Reason.BAD_FIELD, f"{field}: {message}", field=field)
