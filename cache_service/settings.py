"""What the manager's process can be told: flags (`--state-dir`), `KVPOOL_MANAGER_*` variables, defaults. In that order."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "KVPOOL_MANAGER_"
"""`KVPOOL_MANAGER` alone, without a further word, is the clients' variable for the manager's address."""


class LogFormat(StrEnum):
    """How a log line looks."""

    console = "console"
    json = "json"


class LogLevel(StrEnum):
    """The least severe lines that are logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def _default_state_dir(validated: dict[str, Any]) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kvpool" / f"manager-{validated['port']}"


class ManagerSettings(BaseSettings):
    """The cache manager of kvpool: owns every decision about KV blocks, for all workers that register with it."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        cli_kebab_case=True,
        cli_prog_name="python -m kvpool.cache_service",
        cli_hide_none_type=True,
    )

    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="127.0.0.1",
        description="Address to listen on. There is neither encryption nor authentication: "
        "anything but loopback needs a network you trust.",
    )
    port: int = Field(default=50051, ge=0, le=65535, description="TCP port to listen on; 0 takes any free one.")
    state_dir: Path = Field(
        default_factory=_default_state_dir,
        description="Folder for what must outlive the process (the epoch); one manager at a time. "
        "Default: kvpool/manager-PORT below $XDG_STATE_HOME or ~/.local/state.",
    )
    lease_seconds: float = Field(
        default=6.0, gt=0, le=3600, description="Seconds without a KeepAlive after which a worker's session ends."
    )
    keep_alive_seconds: float = Field(
        default=1.0, gt=0, le=3600, description="Seconds between two KeepAlives of a worker; at most half the lease."
    )
    log_format: LogFormat = Field(default=LogFormat.console, description="Format of the log lines on stderr.")
    log_level: LogLevel = Field(default=LogLevel.info, description="Least severe lines to log.")

    @model_validator(mode="after")
    def _one_keep_alive_may_be_lost(self) -> Self:
        if self.keep_alive_seconds * 2 > self.lease_seconds:
            raise ValueError(
                f"keep_alive_seconds ({self.keep_alive_seconds:g}) must be at most half of lease_seconds "
                f"({self.lease_seconds:g}), so that one KeepAlive may be lost"
            )
        return self

    @property
    def tick_seconds(self) -> float:
        """Time between two looks at the leases."""
        return min(0.5, self.keep_alive_seconds / 2)

    @property
    def address(self) -> str:
        """host:port as gRPC writes it, IPv6 hosts in brackets."""
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"{host}:{self.port}"
