"""Settings of the manager's process: flags (`--state-dir`), `KVPOOL_MANAGER_*` variables, [manager] of a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_settings import SettingsConfigDict

from kvpool.process.address import DEFAULT_PORT
from kvpool.process.logs import LogFormat, LogLevel
from kvpool.process.server_settings import ServerSettings
from kvpool.process.settings import state_home


class ManagerSettings(ServerSettings):
    """The cache manager of kvpool: decides about the KV blocks of all workers that register with it.

    Each setting is also a variable, e.g. KVPOOL_MANAGER_LEASE_SECONDS=6, and a line in section [manager] of the file given with
    --config, e.g. lease_seconds = 6. Flags override variables, variables override the file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_MANAGER_", cli_prog_name="kvpool manager")
    table: ClassVar[str] = "manager"

    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="127.0.0.1",
        description="Address to listen on. There is no encryption and no authentication: beyond loopback, use a trusted network.",
    )
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="TCP port to listen on; 0: any free one.")
    state_dir: Path | None = Field(
        default=None,
        description="Folder for the epoch, which must outlive the process; one manager at a time. "
        "Default: kvpool/manager-PORT in $XDG_STATE_HOME or ~/.local/state.",
    )
    election: Annotated[str, StringConstraints(pattern=r"^(file|kubernetes:[a-z0-9.-]+/[a-z0-9.-]+)$")] | None = Field(
        default=None,
        description="Stand by while another manager leads, and take over after it. file: the one that has locked --state-dir, on "
        "a disk that all of them share. kubernetes: the holder of that Lease, which also keeps the epoch. Workers and clients "
        "are given the addresses of all managers. Default: a manager that does not find --state-dir free does not start.",
    )
    leader_lease_seconds: int = Field(
        default=5,
        ge=1,
        le=3600,
        description="With --election kubernetes: a manager that cannot renew its Lease for that long ends, and another one takes "
        "over. Shorter pauses after a loss, but less time in which the API server may be away.",
    )
    kubernetes_api: Annotated[str, StringConstraints(pattern=r"^https?://\S+$")] | None = Field(
        default=None,
        description="With --election kubernetes: URL of the API server, as of `kubectl proxy`. Default: that of the pod's cluster.",
    )
    lease_seconds: float = Field(
        default=6.0, gt=0, le=3600, description="Seconds without a KeepAlive after which a worker's session ends."
    )
    keep_alive_seconds: float = Field(
        default=1.0, gt=0, le=3600, description="Seconds between two KeepAlives of a worker; at most half the lease."
    )
    max_total_blocks: int = Field(
        default=1 << 26,
        ge=1,
        le=1 << 40,
        description="Blocks that all workers together may be granted; each counts once, until its session ends. At the limit pools "
        "stop growing and reuse the blocks that they have. A block takes up to 0.3 KiB of the manager's memory.",
    )
    max_total_tokens: int = Field(
        default=1 << 30,
        ge=1,
        le=1 << 44,
        description="Token slots of the granted blocks of all workers and, counted apart, tokens of all live sequences. At the "
        "limit pools stop growing, and new sequences wait. A token takes 4 bytes of the manager's memory in each of the two.",
    )
    max_watchers: int = Field(
        default=64,
        ge=0,
        le=4096,
        description="Streams of Watch at the same time, shared among peers; 0: none is served.",
    )
    watch_events: int = Field(
        default=1 << 16,
        ge=1,
        le=1 << 24,
        description="Events of the cache's contents that are kept, while somebody follows them, for followers that are late or "
        "come back. Each takes some 0.3 KiB of memory.",
    )
    explain_evictions: int = Field(
        default=1 << 16,
        ge=0,
        le=1 << 20,
        description="Evicted blocks whose names are remembered, so that `kvpool explain` can say when a prefix was evicted, and "
        "for which request. 0: none. A name takes 8 bytes, a request that evicts 0.3 KiB.",
    )
    explain_across_salts: bool = Field(
        default=False,
        description="Let `kvpool explain` say that the tokens of a prompt are cached under another salt. Without it nobody learns "
        "anything of other salts.",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="TCP port for /metrics (Prometheus); 0: any free one, see the log. Default: none.",
    )
    metrics_host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="127.0.0.1", description="Address for /metrics; --host does not change it."
    )
    log_format: LogFormat = Field(default=LogFormat.console, description="Format of the log lines on stderr.")
    log_level: LogLevel = Field(default=LogLevel.info, description="Lowest level to log.")

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
        """Seconds between two checks of the leases."""
        return min(0.5, self.keep_alive_seconds / 2)

    @property
    def state_folder(self) -> Path:
        """--state-dir, or the default that goes with the port."""
        if self.state_dir is not None:
            return self.state_dir
        return state_home() / f"manager-{self.port}"
