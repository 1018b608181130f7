"""`kvpool health`: does a service serve?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.process.address import DEFAULT_MANAGER

from ...config import MANAGER_VARIABLE
from ...errors import Unavailable
from ...health import DEFAULT_TIMEOUT_SECONDS, ask_health


def health(
    address: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", envvar=MANAGER_VARIABLE, help="A manager or a worker.")
    ] = DEFAULT_MANAGER,
    service: Annotated[
        str, typer.Option("--service", help="One service, e.g. kvpool.v1.CacheService.", show_default="all of them")
    ] = "",
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Seconds to wait for the answer.")
    ] = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Ask a service by grpc.health.v1 whether it serves. Exit status 1 if it does not."""
    found = ask_health(address, service, timeout)
    if not found.serving:
        raise Unavailable(found.line, reason="NOT_SERVING")
    print(found.line)
