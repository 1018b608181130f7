"""The objects that the routes of one gateway's page share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from starlette.requests import HTTPConnection

from kvpool.client import Client

from ..request_log import RequestLog
from .hub import Hub, follow_pictures
from .prefix_follower import Prefixes, follow_contents
from .request_feed import RequestFeed


@dataclass(frozen=True, slots=True)
class Page:
    """The objects of the page, made in the app's lifespan."""

    hub: Hub
    prefixes: Prefixes


@asynccontextmanager
async def open_page(client: Client, log: RequestLog) -> AsyncIterator[Page]:
    """Open the page of the client's cluster. It calls the manager only while somebody looks."""
    hub = Hub(follow_pictures(client), RequestFeed(log))
    prefixes = Prefixes(follow_contents(client))
    try:
        yield Page(hub, prefixes)
    finally:
        await prefixes.close()
        await hub.close()


def page_of(connection: HTTPConnection) -> Page:
    """Return the page that this request belongs to."""
    return cast(Page, connection.app.state.page)
