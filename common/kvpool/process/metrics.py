"""/metrics over HTTP, in Prometheus' text format; each service fills the page.

The page is filled on the event loop, which owns all state, when it is requested; it is written out in a thread, so that a long
one keeps no call waiting. Nothing is registered anywhere.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Final, Self

import structlog
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import Metric

from .address import is_loopback, join_host_port, listen
from .histogram import Histogram

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.metrics")

PATH: Final = "/metrics"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS: Final = 32
"""Connections at the same time; more are closed at once."""
MAX_HEAD_BYTES: Final = 16 << 10
"""Largest head of a request."""
CONNECTION_SECONDS: Final = 10.0
"""Time for one connection. Prometheus gives up after as long by default."""

_PROCESS: Final = ProcessCollector(registry=None)


class MetricsPage:
    """The answer to one request, to be filled by calls in any order. Names end in their unit; a counter's without `_total`."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """Add a value that goes up and down."""
        self._family(name, text, "gauge").add_sample(name, labels, value)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """Add a value that only grows, from 0 at the start of the process."""
        self._family(name, text, "counter").add_sample(f"{name}_total", labels, value)

    def histogram(self, name: str, text: str, values: Histogram, **labels: str) -> None:
        """Add counts of values by size."""
        family = self._family(name, text, "histogram")
        buckets = values.cumulative()
        for bound, count in buckets:
            family.add_sample(
                f"{name}_bucket", {**labels, "le": "+Inf" if bound == math.inf else repr(float(bound))}, count
            )
        family.add_sample(f"{name}_count", labels, buckets[-1][1])
        family.add_sample(f"{name}_sum", labels, values.sum)

    def _family(self, name: str, text: str, kind: str) -> Metric:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = Metric(name, text, kind)
        assert family.type == kind, name
        return family

    def collect(self) -> Iterable[Metric]:
        """Yield the rows of the page, and the operating system's figures for this process."""
        yield from self._families.values()
        yield from _PROCESS.collect()


def listen_for_metrics(host: str, port: int) -> socket.socket:
    """Make a socket that listens; port 0 takes any free one. Raises PortError."""
    return listen(host, port, flags="--metrics-")


class MetricsServer:
    """Answers GET /metrics on `listener`, which it closes in the end. `fill` is called for every answer.

    While `is_serving` returns False the answer is 503, so that a process that its callers cannot reach does not look healthy.
    """

    def __init__(
        self,
        listener: socket.socket,
        fill: Callable[[MetricsPage], None],
        is_serving: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.host: str = host
        self.url = f"http://{join_host_port(host, port)}{PATH}"
        self._listener = listener
        self._fill = fill
        self._is_serving = is_serving
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Serve, and log the URL."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener, limit=MAX_HEAD_BYTES)
        log.info("metrics", url=self.url)
        if not is_loopback(self.host):
            log.warning("metrics beyond loopback without encryption or authentication", host=self.host)

    async def stop(self) -> None:
        """Close the listener and every connection."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            log.debug("request for metrics broke off")
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, protocol = rest.partition(" ")
        if not protocol.startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        if target.partition("?")[0] != PATH:
            return _response(HTTPStatus.NOT_FOUND)
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        page = MetricsPage()
        if self._is_serving is not None and not await self._is_serving():
            return _response(HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            self._fill(page)
            body = await asyncio.to_thread(generate_latest, page)
        except Exception:
            # A scrape must not stop the process.
            log.exception("metrics page failed")
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _response(HTTPStatus.OK, body, CONTENT_TYPE, with_body=method == "GET")


def _response(
    status: HTTPStatus, body: bytes = b"", content_type: str = "text/plain", *, with_body: bool = True
) -> bytes:
    if status is not HTTPStatus.OK:
        body = f"{status.phrase}; the metrics are at {PATH}\n".encode()
    allowed = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"{allowed}Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
