"""The outermost layer of the application: gives each request an id, counts and logs it, bounds its body, and answers failures."""

from __future__ import annotations

import re
import time
from http import HTTPStatus
from typing import Final
from uuid import uuid4

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .event_stream import ReaderLeft
from .metrics import GatewayMetrics

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""Form of an id that a caller may choose: visible ASCII."""
UNKNOWN_ROUTE: Final = "other"
_MAX_LOGGED_PATH: Final = 256
_SMALL_BODY_BYTES: Final = 64 << 10
"""Bytes of each body that are always read."""
_LARGE_BODIES: Final = 8
"""Bodies of the largest size: all bodies together may have that many bytes beyond the small part, until their answers begin."""
_QUIET: Final = frozenset({"/health", "/metrics"})
"""Routes that are requested all the time: they are logged for debugging only."""


class RequestObservation:
    """ASGI middleware that observes every request."""

    def __init__(self, app: ASGIApp, *, routes: list[BaseRoute], metrics: GatewayMetrics, max_body_bytes: int) -> None:
        self._app = app
        self._routes = routes
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._num_held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid4().hex
        scope["kvpool.request_id"] = request_id
        logged_path = scope["path"][:_MAX_LOGGED_PATH]
        began = time.monotonic()
        status = 0
        num_received = num_held = 0

        def hold(num_bytes: int) -> None:
            nonlocal num_held
            self._num_held_bytes += num_bytes - num_held
            num_held = num_bytes

        async def receive_bounded() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_body_bytes:
                raise _too_large(self._max_body_bytes)
            if not status and num_received > _SMALL_BODY_BYTES:
                hold(num_received - _SMALL_BODY_BYTES)
                if self._num_held_bytes > _LARGE_BODIES * self._max_body_bytes:
                    raise _too_many(self._max_body_bytes)
            return message

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                hold(0)
                status = int(message["status"])  # an HTTPStatus is logged as its name
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            elif message["type"] == "http.response.body":
                self._metrics.sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            if _declared_bytes(headers) > self._max_body_bytes:
                raise _too_large(self._max_body_bytes)
            await self._app(scope, receive_bounded, send_observed)
        except ApiError as error:
            if status:
                raise
            await error.response()(scope, receive, send_observed)
        except ClientDisconnect:
            pass  # it left before its body was complete: nobody is there to answer, and nothing failed here
        except ReaderLeft:
            self._metrics.lost_readers += 1  # before its answer began
        except Exception:
            log.exception("request failed", method=scope["method"], path=logged_path, request_id=request_id)
            if status:
                raise  # the connection breaks off: the reader must not take the answer for complete
            failed = ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"the gateway failed at this request, which is a defect; its log has the traceback under request {request_id}",
                code="internal_error",
            )
            await failed.response()(scope, receive, send_observed)
        finally:
            hold(0)
            route = self._route_of(scope)
            seconds = time.monotonic() - began
            self._metrics.requests[route, status] += 1
            self._metrics.request_seconds.observe(seconds)
            line = log.debug if route in _QUIET or status == 0 else log.info
            line(
                "request",
                method=scope["method"],
                path=logged_path,
                status=status,
                ms=round(seconds * 1000, 1),
                request_id=request_id,
            )

    def _route_of(self, scope: Scope) -> str:
        """Return the route's own path, or one word for all requests without a route, so that callers cannot invent labels."""
        for route in self._routes:
            match, _ = route.matches(scope)
            if match is not Match.NONE:
                return str(getattr(route, "path", UNKNOWN_ROUTE)) or "/"
        return UNKNOWN_ROUTE


def _declared_bytes(headers: Headers) -> int:
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isdigit() and len(declared) < 20 else 0


def _too_large(most: int) -> ApiError:
    # The connection stays open and drops the rest of the body: to close it while the caller sends would reset it, and the caller
    # would see a broken connection and not this answer.
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a request's body may have {most} bytes (--max-body-bytes): send less",
        code="request_too_large",
    )


def _too_many(most: int) -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"the gateway holds {_LARGE_BODIES * most} bytes of requests that have no answer yet: try again later, or send less",
        code="too_many_bodies",
        headers={"Retry-After": "1"},
    )
