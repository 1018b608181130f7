"""The objects that all routes of one gateway use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from starlette.requests import HTTPConnection

from kvpool.client import Client
from kvpool.client.encoding import Encoding

from .connection import ConnectionLimits
from .metrics import GatewayMetrics
from .pages.hub import Hub
from .pages.prefix_follower import Prefixes
from .request_log import RequestLog
from .settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Gateway:
    """The objects of one gateway. Made in the app's lifespan, because the client's channels belong to the event loop."""

    settings: GatewaySettings
    client: Client
    metrics: GatewayMetrics
    limits: ConnectionLimits
    request_log: RequestLog
    hub: Hub
    prefixes: Prefixes
    encoding: Encoding = field(default_factory=Encoding)
    """Tokenises the texts of /tokenize."""


def gateway_of(connection: HTTPConnection) -> Gateway:
    """Return the gateway that serves this request."""
    return cast(Gateway, connection.app.state.gateway)


def request_id_of(connection: HTTPConnection) -> str:
    """Return the id of this request, as in X-Request-Id and in the log."""
    return cast(str, connection.scope["kvpool.request_id"])
