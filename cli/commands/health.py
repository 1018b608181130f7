"""`kvpool health`: whether a service serves."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.client.config import MANAGER_VARIABLE
from kvpool.client.errors import Unavailable
from kvpool.client.health import DEFAULT_TIMEOUT_SECONDS, ask_health
from kvpool.process.address import DEFAULT_MANAGER

from ..terminal import JsonOption, print_json


def health(
    address: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", envvar=MANAGER_VARIABLE, help="A manager or a worker.")
    ] = DEFAULT_MANAGER,
    service: Annotated[
        str, typer.Option(help="One service, e.g. kvpool.v1.CacheService.", show_default="all of them")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds to wait for the answer.")
    ] = DEFAULT_TIMEOUT_SECONDS,
    as_json: JsonOption = False,
) -> None:
    """Ask a service by grpc.health.v1 whether it serves. Exit status 1 if it does not."""
    answer = ask_health(address, service, timeout)
    if as_json:
        print_json({"address": address, "service": service, "serving": answer.serving, "message": answer.line})
        raise typer.Exit(not answer.serving)
    if not answer.serving:
        raise Unavailable(answer.line, reason="NOT_SERVING")
    print(answer.line)
