"""Connections whose end takes two: a head that is too long, a refused body, an answer that is not taken, a server that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any, NamedTuple

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpool.gateway import server as server_module
from kvpool.gateway.app import connection_limits
from kvpool.gateway.connection import ENDLESS_PATHS, MAX_HEAD_BYTES, BoundedConnection, ConnectionLimits, bounded
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.address import listen
from tests.gateway.serving import exchange, head, http_client, serving
from tests.until import until

HALF_A_HEAD = head("GET /").removesuffix(b"\r\n")
LINE = b"X: " + b"x" * 995 + b"\r\n"
NUM_TOO_MANY = MAX_HEAD_BYTES // len(LINE) + 1


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http"
    while (await receive())["type"] != "http.disconnect":
        pass


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await silent(scope, receive, send)


class Served(NamedTuple):
    server: uvicorn.Server
    port: int
    limits: ConnectionLimits

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, BoundedConnection]]:
        """A caller's end and the server's end of a connection, the only one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        await until(lambda: len(self.server.server_state.connections) == 1)
        (connection,) = self.server.server_state.connections
        assert isinstance(connection, BoundedConnection)
        yield reader, writer, connection
        writer.close()


@asynccontextmanager
async def bounded_server(app: ASGIApp, grace: int = 0, **settings: float) -> AsyncIterator[Served]:
    """A server of the application, with the gateway's connections."""
    limits = connection_limits(GatewaySettings(**settings))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    options: dict[str, Any] = {"loop": "none", "ws": "none", "lifespan": "off", "log_config": None}
    config = uvicorn.Config(app, http=bounded(limits), timeout_graceful_shutdown=grace, **options)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([listener]))
    try:
        yield Served(server, listener.getsockname()[1], limits)
    finally:
        server.should_exit = True
        await running


async def test_a_head_that_comes_in_many_pieces_is_bounded_as_a_whole() -> None:
    async with bounded_server(silent) as served, served.caller() as (reader, _, connection):
        connection.data_received(HALF_A_HEAD)
        for number in range(NUM_TOO_MANY):
            assert served.limits.ended["head"] == 0, number
            connection.data_received(LINE)
        assert served.limits.ended["head"] == 1
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_comes_while_the_request_before_is_served_is_bounded_too() -> None:
    async with bounded_server(silent) as served, served.caller() as (reader, _, connection):
        connection.data_received(head("GET /"))
        await asyncio.sleep(0)
        connection.data_received(HALF_A_HEAD + LINE * NUM_TOO_MANY)
        assert served.limits.ended["head"] == 1
        assert (await reader.readline()).startswith(b"HTTP/1.1 431 ")


async def test_a_head_sent_during_an_answer_is_bounded() -> None:
    """The connection ends: an answer has begun, so no other can be given."""
    async with bounded_server(endless) as served, served.caller() as (reader, writer, _):
        writer.write(head("GET /"))
        await reader.readuntil(b"begun")
        writer.write(HALF_A_HEAD + LINE * NUM_TOO_MANY)
        async with asyncio.timeout(20):
            assert await reader.read() == b"\r\n"
        assert served.limits.ended["head"] == 1


async def test_a_body_is_no_part_of_the_head_that_it_comes_with() -> None:
    async with bounded_server(silent) as served, served.caller() as (_, _, connection):
        size = 2 * MAX_HEAD_BYTES
        connection.data_received(head("POST /", f"Content-Length: {size}") + b"x" * size)
        assert served.limits.ended["head"] == 0


async def test_a_connection_that_was_turned_away_gives_back_no_place() -> None:
    async with bounded_server(silent, max_connections=1) as served, served.caller():
        assert (await exchange(served.port, b"")).startswith(b"HTTP/1.1 503 ")
        await until(lambda: served.limits.num_refused == 0)
        assert served.limits.num_connections == 1
    await until(lambda: served.limits.num_connections == 0)


@pytest.mark.parametrize("declared", [True, False])
async def test_who_sends_a_body_that_is_too_large_reads_why(declared: bool) -> None:
    """Also who reads only once the whole body is sent; and the connection serves the next request."""
    size = 8 << 20

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size >> 16):
            yield b"x" * (1 << 16)

    async with serving(max_body_bytes=1 << 20) as server, http_client(server.url) as client:
        headers = {"Content-Length": str(size)} if declared else {}
        answer = await client.post("/tokenize", content=body(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        assert (await client.get("/version")).status_code == 200


async def test_a_caller_that_leaves_in_its_body_is_no_failure_of_the_gateway() -> None:
    async with serving() as server, http_client(server.url) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("POST /tokenize", "Content-Length: 100") + b"{")
        await writer.drain()
        writer.close()
        page = ""
        async with asyncio.timeout(20):
            while 'route="/tokenize"' not in page:
                page = (await client.get("/metrics")).text
        assert 'kvpool_gateway_requests_total{route="/tokenize",status="0"} 1.0\n' in page
        assert page.count('route="/tokenize"') == 1


async def test_a_connection_whose_body_came_after_its_answer_is_idle() -> None:
    """And is closed as any other that is idle."""
    async with serving(api_key=["a-key-of-this-test"], idle_seconds=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("POST /tokenize", "Content-Length: 2") + b"{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        writer.write(b"}")
        async with asyncio.timeout(20):
            assert b"invalid_api_key" in await reader.read()
        writer.close()


async def test_a_connection_that_closes_does_not_wait_for_a_reader_that_does_not_read() -> None:
    """Less than what makes uvicorn pause is left in its buffer."""
    async with bounded_server(silent, idle_seconds=0.2, reader_seconds=0.5) as served:
        async with served.caller() as (_, writer, connection):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            # Fill the kernel's buffers past the point where the rest stays in the process, but is not much.
            connection.transport.set_write_buffer_limits(high=1 << 30)
            while connection.transport.get_write_buffer_size() == 0:
                connection.transport.write(b"x" * (1 << 14))
            assert connection.transport.get_write_buffer_size() < 1 << 16
            await until(lambda: served.limits.num_connections == 0)
        assert served.limits.ended["idle"] == served.limits.ended["reader"] == 1


@pytest.mark.parametrize("path", sorted(ENDLESS_PATHS))
async def test_an_open_page_does_not_hold_up_the_end_of_the_gateway(path: str) -> None:
    """Other answers have the whole grace."""
    async with bounded_server(endless, grace=600) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(head(f"GET {path}"))
        await reader.readuntil(b"begun")
        began = monotonic()
    assert monotonic() - began < 300
    writer.close()


async def test_an_application_that_does_not_start_is_an_error_and_no_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log has its cause."""

    @asynccontextmanager
    async def fails(_: Starlette) -> AsyncIterator[None]:
        raise OSError("no room for the client")
        yield

    monkeypatch.setattr(server_module, "make_app", lambda *_: Starlette(lifespan=fails))
    with pytest.raises(RuntimeError, match="did not start"):
        async with serving():
            pass
    assert "no room for the client" in caplog.text
