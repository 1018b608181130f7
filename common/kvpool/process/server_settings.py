"""The settings of every gRPC server of kvpool: limits on its connections."""

from __future__ import annotations

import resource
from typing import Final

import structlog
from pydantic import Field

from .channel_options import PING_SECONDS, PING_TIMEOUT_SECONDS, SERVER_OPTIONS
from .settings import ProcessSettings

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.server")

SPARE_DESCRIPTORS: Final = 128
"""File descriptors for everything but the connections of callers."""

MIN_CONNECTIONS: Final = 16
"""Fewest connections with which a server can work."""


class ServerSettings(ProcessSettings):
    """Limits on connections. A process that serves over gRPC has these among its settings."""

    ping_seconds: float = Field(
        default=PING_SECONDS,
        ge=1,
        le=3600,
        description="Seconds of silence after which a connection is pinged. A peer that does not answer within 10 s is gone, and "
        "its calls end.",
    )
    max_connections: int = Field(
        default=4096,
        ge=MIN_CONNECTIONS,
        le=1 << 20,
        description="Connections at the same time; more are closed at once. Each takes a file descriptor (ulimit -n).",
    )
    max_concurrent_streams: int = Field(
        default=4096,
        ge=1,
        le=1 << 20,
        description="Calls at the same time on one connection; more wait at the caller.",
    )
    max_connection_age: float = Field(
        default=3600.0,
        ge=0,
        le=1 << 20,
        description="Seconds after which a connection takes no new calls and its caller connects again; calls on it run to "
        "their end. 0: no limit.",
    )

    def server_options(self, max_connections: int) -> tuple[tuple[str, int], ...]:
        """Return the options of a gRPC server that takes at most `max_connections`."""
        age: tuple[tuple[str, int], ...] = ()
        if self.max_connection_age:
            # Without a grace gRPC lets calls in flight run to their end.
            age = (("grpc.max_connection_age_ms", max(1, round(self.max_connection_age * 1000))),)
        return (
            *SERVER_OPTIONS,
            # Our own pings find peers whose machine is gone, so that their connections do not stay for ever.
            ("grpc.keepalive_time_ms", round(self.ping_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", round(PING_TIMEOUT_SECONDS * 1000)),
            # Without it a ping that is not answered ends the connection after a minute, despite the line above.
            ("grpc.http2.ping_timeout_ms", round(PING_TIMEOUT_SECONDS * 1000)),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            *age,
        )


def descriptors_for_connections(max_connections: int) -> int:
    """Return `max_connections`, or fewer if this process may not open as many descriptors. Its limit is raised as far as the system
    allows.

    Without descriptors gRPC still works, but nothing else in the process does.
    """
    needed = max_connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return max_connections
    possible = min(max_connections, max(MIN_CONNECTIONS, allowed - SPARE_DESCRIPTORS))
    log.warning(
        "fewer connections than --max-connections: the limit of file descriptors (ulimit -n) does not allow more",
        max_connections=max_connections,
        possible=possible,
        descriptors=allowed,
    )
    return possible
