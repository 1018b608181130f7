#!/usr/bin/env python3
"""Asks a service for its health by the standard protocol grpc.health.v1.

Containers run this every few seconds, next to work that needs the cores. So the file imports gRPC and nothing of kvpool: the
images hold it as the command `kvpool-health`, which needs a quarter of the CPU time of `kvpool health`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEFAULT_TIMEOUT_SECONDS = 2.0
_OPTIONS = [("grpc.enable_http_proxy", 0)]  # a proxy for the web must not see the way to a service on this machine


class Health(NamedTuple):
    """The health that a service reports."""

    serving: bool
    line: str
    """One line for people, with the address, and what to do if it does not serve."""


def ask_health(addresses: str, service: str = "", timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Health:
    """Ask the service at host:port for its health, or several, with commas between them, until one serves. `service` "" means the
    process as a whole.
    Blocks for up to `timeout_seconds` for each.

    Never raises for what the other side does: a service that does not answer does not serve.
    """
    health = Health(False, "")
    for address in addresses.split(","):
        health = _ask(address.strip(), service, timeout_seconds)
        if health.serving:
            break
    return health


def _ask(address: str, service: str, timeout_seconds: float) -> Health:
    if not address.rpartition(":")[2].isdecimal():
        return Health(False, f"{address!r} is no address to ask for its health: give HOST:PORT")
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
        except grpc.RpcError as error:
            return Health(False, f"{address} {_reason(error, service, timeout_seconds)}")
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return Health(True, f"{address} serves{f' {service}' if service else ''}")
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Health(
        False,
        f"{address} says {name}: it starts or stops, or it is a worker whose manager does not answer; see its log",
    )


def _reason(error: grpc.RpcError, service: str, timeout_seconds: float) -> str:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"has not answered within {timeout_seconds:g} s; give a longer --timeout, or see its log"
    if code is grpc.StatusCode.NOT_FOUND:
        return f"has no service {service!r}; without --service it says how it is as a whole"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "does not speak grpc.health.v1: another program listens on this port"
    if "resolv" in (details or ""):
        return "has a host name that cannot be resolved"
    return f"does not answer; is it running, and is this its address? ({code.name}: {details!r})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the health as a line; returns 0 if the service serves, else 1."""
    parser = argparse.ArgumentParser(prog="kvpool-health", description="Exit status 0 if the service serves, else 1.")
    default = os.environ.get("KVPOOL_MANAGER") or "127.0.0.1:50051"
    parser.add_argument("address", nargs="?", default=default, metavar="HOST:PORT", help=f"default: {default}")
    parser.add_argument("--service", default="", help="one service, e.g. kvpool.v1.CacheService; default: all of them")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_SECONDS, help="seconds; default: %(default)g")
    given = parser.parse_args(arguments)
    health = ask_health(given.address, given.service, given.timeout)
    print(health.line, file=sys.stdout if health.serving else sys.stderr)
    return 0 if health.serving else 1


if __name__ == "__main__":
    sys.exit(main())
