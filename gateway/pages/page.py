"""What the routes of one gateway's page share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

import grpc.aio
from starlette.requests import HTTPConnection

from kvpool.v1 import cache_pb2_grpc

from .hub import Hub
from .pictures import manager_pictures

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),
    # A manager that has vanished without a word is noticed by the pings that it does not answer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # A manager that comes back is found within a second.
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class Page:
    """Made in the app's lifespan."""

    manager: cache_pb2_grpc.CacheServiceStub
    hub: Hub


@asynccontextmanager
async def open_page(manager: str) -> AsyncIterator[Page]:
    """The page of the cluster behind `manager`, host:port. Connects when somebody looks."""
    async with grpc.aio.insecure_channel(manager, options=_OPTIONS) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        hub = Hub(manager_pictures(stub))
        try:
            yield Page(stub, hub)
        finally:
            await hub.close()


def page_of(connection: HTTPConnection) -> Page:
    """The page that this request belongs to."""
    return cast(Page, connection.app.state.page)
