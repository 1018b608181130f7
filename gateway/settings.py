"""Settings of the gateway's process: flags (`--port`), `KVPOOL_GATEWAY_*` variables, [gateway] of a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import Field, StringConstraints
from pydantic_settings import SettingsConfigDict

from kvpool.process.address import DEFAULT_MANAGER
from kvpool.process.logs import LogFormat, LogLevel
from kvpool.process.settings import ProcessSettings

DEFAULT_PORT: Final = 8000


class GatewaySettings(ProcessSettings):
    """OpenAI's API and a live page in front of a cluster of kvpool.

    Each setting is also a variable, e.g. KVPOOL_GATEWAY_PORT=8000, and a line in section [gateway] of the file given with --config,
    e.g. port = 8000. Flags override variables, variables override the file.
    """

    model_config = SettingsConfigDict(env_prefix="KVPOOL_GATEWAY_", cli_prog_name="kvpool gateway")
    table: ClassVar[str] = "gateway"
    shared_variables: ClassVar[Mapping[str, str]] = {"manager": "KVPOOL_MANAGER"}

    manager: str = Field(default=DEFAULT_MANAGER, description="host:port of the cache manager.")
    host: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="127.0.0.1", description="Address to listen on. Beyond loopback it needs --api-key or --no-api-key."
    )
    port: int = Field(default=DEFAULT_PORT, ge=0, le=65535, description="TCP port to listen on; 0: any free one.")
    log_format: LogFormat = Field(default=LogFormat.console, description="Format of the log lines on stderr.")
    log_level: LogLevel = Field(default=LogLevel.info, description="Lowest level to log.")
