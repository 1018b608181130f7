"""The settings of a client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpool.process.address import DEFAULT_MANAGER, require_managers

from .errors import InvalidRequest
from .model_files import DEFAULT_MAX_BYTES

MANAGER_VARIABLE: Final = "KVPOOL_MANAGER"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Settings of one client. Times are in seconds. Validated when it is made: InvalidRequest."""

    manager: str = DEFAULT_MANAGER
    """host:port of the cache manager. If several are given, with commas between them or by a name with several addresses, the one
    that leads is asked. file:PATH names a file that lists them; it is read again when none answers. Channels to the manager and to
    the workers are not encrypted: use them beyond this machine only on a network that you trust."""
    timeout: float = 600.0
    """How long a generate or chat may take from its start to its last token, unless the call says otherwise."""
    unary_timeout: float = 5.0
    """How long one short call to the manager may take before it counts as unanswered."""
    first_contact: float = 5.0
    """How long to look for a manager that has never answered this client. One that has answered is waited for until the
    time-out of the request: it is restarting."""
    worker_wait: float = 5.0
    """How long to wait for a live worker when the manager knows none: after its restart they register again."""
    max_attempts: int = 8
    """Most workers to try for one request, over its whole life."""
    liveness_interval: float = 2.0
    """How often to ask the manager whether a silent worker still lives."""
    continuation: bool = True
    """Whether a stream whose worker dies, freezes or leaves after the first token continues on another one. If not, it ends
    with Unavailable, and the tokens delivered are all there is."""

    max_model_bytes: int = DEFAULT_MAX_BYTES
    """Most bytes of tokenizer, chat template and special tokens of one model together that this client receives and keeps."""

    def __post_init__(self) -> None:
        try:
            require_managers(self.manager)
        except ValueError:
            raise InvalidRequest(
                f"the manager's address must be host:port, several with commas between, or file:PATH of a file that lists them, "
                f"got {self.manager!r}; e.g. {DEFAULT_MANAGER}",
                reason="BAD_FIELD",
            ) from None
        for name in ("timeout", "unary_timeout", "first_contact", "worker_wait", "liveness_interval"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise InvalidRequest(f"{name} must be in (0, 86400] seconds, got {value}", reason="BAD_FIELD")
        if not 1 <= self.max_attempts <= 64:
            raise InvalidRequest(f"max_attempts must be in 1 … 64, got {self.max_attempts}", reason="BAD_FIELD")
        if not 1 <= self.max_model_bytes <= 2**32:
            raise InvalidRequest(
                f"max_model_bytes must be in 1 … 2**32, got {self.max_model_bytes}", reason="BAD_FIELD"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ClientConfig:
        """Return the defaults, with the manager of KVPOOL_MANAGER if that is set."""
        return cls(manager=environment.get(MANAGER_VARIABLE) or DEFAULT_MANAGER)
