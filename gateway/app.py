"""The ASGI application."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from kvpool.client import Client, ClientConfig, KvpoolError

from .access import Access, AccessKeys
from .connection import ConnectionLimits
from .context import Gateway
from .errors import ApiError, on_error
from .metrics import GatewayMetrics
from .observation import RequestObservation
from .pages.hub import MAX_SEQUENCES, PICTURE_MS, Hub
from .pages.prefix_follower import Prefixes
from .pages.request_feed import RequestFeed
from .request_log import RequestLog
from .routes import all_routes
from .settings import GatewaySettings


def connection_limits(settings: GatewaySettings) -> ConnectionLimits:
    names = {"max_connections", "idle_seconds", "head_seconds", "body_seconds", "reader_seconds"}
    return ConnectionLimits(**settings.model_dump(include=names))


def make_app(settings: GatewaySettings, limits: ConnectionLimits | None = None) -> Starlette:
    """Make the application. Its lifespan opens and closes a client of the cluster. `limits` are those of its server."""
    metrics = GatewayMetrics()
    limits = limits or connection_limits(settings)
    keys = AccessKeys(settings.keys)
    routes = all_routes(keys)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        config = ClientConfig(manager=settings.manager, timeout=settings.timeout)
        log = RequestLog(settings.kept_requests, time.monotonic)
        async with Client(config=config) as client:
            pictures = partial(client.watch, interval=PICTURE_MS / 1000, blocks=True, max_sequences=MAX_SEQUENCES)
            hub = Hub(pictures, RequestFeed(log))
            prefixes = Prefixes(partial(client.watch, pictures=False, contents=True))
            app.state.gateway = Gateway(settings, client, metrics, limits, log, hub, prefixes)
            try:
                yield
            finally:
                await prefixes.close()
                await hub.close()

    middleware = [
        Middleware(RequestObservation, routes=routes, metrics=metrics, max_body_bytes=settings.max_body_bytes),
        *_cors(settings),
        Middleware(
            Access,
            keys=keys,
            allowed_hosts=[settings.host, *settings.allowed_host],
            cors_origins=settings.cors_origin,
        ),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: _on_http_exception, ApiError: on_error, KvpoolError: on_error},
    )


def _cors(settings: GatewaySettings) -> list[Middleware]:
    if not settings.cors_origin:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "X-Kvpool-Ignored", "Retry-After"],
        )
    ]


_MAX_SHOWN: Final = 256
_CODES: Final = {404: "not_found", 405: "method_not_allowed"}


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    said = {
        404: f"there is nothing at {path[:_MAX_SHOWN]}; docs/OPENAI.md lists the paths",
        405: f"{path[:_MAX_SHOWN]} does not take {method[:_MAX_SHOWN]}",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, said, code=_CODES.get(error.status_code), headers=error.headers).response()
