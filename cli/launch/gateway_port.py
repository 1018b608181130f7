"""The port of a gateway, as a setting of a command that starts one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Final

from pydantic import AfterValidator, Field

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
