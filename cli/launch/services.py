"""`kvpool manager …`, `kvpool worker …` and `kvpool gateway …`: this process becomes the service.

The program `kvpool` does that before it imports this module, which lists these commands with the others.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Final

import typer
from pydantic import AfterValidator, Field

from kvpool.process.services import GATEWAY_MODULE, MANAGER_MODULE, WORKER_MODULE, become, service_command

_GATEWAY_NEEDS: Final = ("httptools", "starlette", "uvicorn")
"""Packages of the extra [gateway] that a gateway needs."""


def manager(context: typer.Context) -> None:
    """Run a cache manager. All arguments go to it; `kvpool manager --help` lists them."""
    become(service_command(MANAGER_MODULE, context.args))


def worker(context: typer.Context) -> None:
    """Run a worker. All arguments go to it; `kvpool worker --help` lists them."""
    become(service_command(WORKER_MODULE, context.args))


def gateway(context: typer.Context) -> None:
    """Run a gateway: OpenAI's API and a live page. All arguments go to it; `kvpool gateway --help` lists them."""
    become(service_command(GATEWAY_MODULE, context.args))


def missing_for_gateway() -> str:
    """Say what to install before a gateway can run; empty: nothing is missing."""
    missing = [name for name in _GATEWAY_NEEDS if find_spec(name) is None]
    if not missing:
        return ""
    verb = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {verb} not installed: the gateway needs an extra, pip install 'kvpool[gateway]'"


def _require_gateway(port: int) -> int:
    if missing := missing_for_gateway():
        raise ValueError(missing)
    return port


GatewayPort = Annotated[int, Field(ge=1, le=65535), AfterValidator(_require_gateway)]
"""Port of a gateway, as a setting that starts one: the gateway's packages must be installed."""
