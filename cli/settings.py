"""Settings of the commands that call a cluster, apart from their flags, and a setting of those that start one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from kvpool.client.config import MANAGER_VARIABLE, ClientConfig
from kvpool.process.address import DEFAULT_MANAGER
from kvpool.process.settings import ProcessSettings

_DEFAULTS: Final = ClientConfig()


class ClientSettings(ProcessSettings):
    """`KVPOOL_CLIENT_*` variables, $KVPOOL_MANAGER, and [client] of the file that $KVPOOL_CONFIG names. ClientConfig describes
    them."""

    model_config = SettingsConfigDict(env_prefix="KVPOOL_CLIENT_", cli_prog_name="kvpool")
    table: ClassVar[str] = "client"
    shared_variables: ClassVar[Mapping[str, str]] = {"manager": MANAGER_VARIABLE}

    manager: str = DEFAULT_MANAGER
    timeout: float = Field(default=_DEFAULTS.timeout, gt=0, le=86_400)
    max_attempts: int = Field(default=_DEFAULTS.max_attempts, ge=1, le=64)
    continuation: bool = _DEFAULTS.continuation
    max_model_bytes: int = Field(default=_DEFAULTS.max_model_bytes, ge=1, le=2**32)


_GATEWAY_NEEDS: Final = ("httptools", "starlette", "uvicorn")
"""Packages of the extra [gateway] that a gateway needs."""


def _require_gateway(port: int) -> int:
    if missing := [name for name in _GATEWAY_NEEDS if find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(
            f"{' and '.join(missing)} {verb} not installed: the gateway needs an extra, pip install 'kvpool[gateway]'"
        )
    return port


GatewayPort = Annotated[int, Field(ge=1, le=65535), AfterValidator(_require_gateway)]
"""Its packages must be installed."""
