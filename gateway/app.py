"""The ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from kvpool.client import Client, ClientConfig

from .context import Gateway
from .openai.routes import openai_routes
from .pages.routes import page_routes
from .settings import GatewaySettings


def make_app(settings: GatewaySettings, *, clock: Callable[[], float] = time.monotonic) -> Starlette:
    """The application. Its lifespan opens a client of the cluster, and closes it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with Client(config=ClientConfig(manager=settings.manager)) as client:
            app.state.gateway = Gateway(settings, client, clock)
            yield

    return Starlette(routes=[*openai_routes(), *page_routes()], lifespan=lifespan)
