"""Connections whose end takes two: a refused body, a head after a request, an answer that is not taken, a server that stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from kvpool.gateway import server as server_module
from kvpool.gateway.app import connection_limits
from kvpool.gateway.connection import ENDLESS_PATHS, MAX_HEAD_BYTES, BoundedConnection, ConnectionLimits, bounded
from kvpool.gateway.settings import GatewaySettings
from kvpool.process.address import listen
from tests.gateway.serving import http_client, serving
from tests.until import until

HEAD = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def endless(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers and does not end until its reader goes."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def endless_server(grace: int, **settings: float) -> AsyncIterator[tuple[uvicorn.Server, int, ConnectionLimits]]:
    """A server whose every answer is endless, with the gateway's connections."""
    limits = connection_limits(GatewaySettings(**settings))  # type: ignore[arg-type]
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        endless,
        http=bounded(limits),
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=grace,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server._serve([listener]))
    try:
        yield server, listener.getsockname()[1], limits
    finally:
        server.should_exit = True
        await running


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
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        counted: list[str] = []
        async with asyncio.timeout(20):
            while not counted:
                page = (await client.get("/metrics")).text.splitlines()
                counted = [line for line in page if 'route="/tokenize"' in line]
        assert counted == ['kvpool_gateway_requests_total{route="/tokenize",status="0"} 1.0']


async def test_a_connection_whose_body_came_after_its_answer_is_idle() -> None:
    """And is closed as any other that is idle."""
    async with serving(api_key=["a-key-of-this-test"], idle_seconds=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
        writer.write(b"}")
        async with asyncio.timeout(20):
            assert b"invalid_api_key" in await reader.read()
        writer.close()


async def test_a_head_sent_during_an_answer_is_bounded() -> None:
    """The connection ends: an answer has begun, so no other can be given."""
    async with endless_server(0) as (_, port, limits):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % b"/")
        await reader.readuntil(b"begun")
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES))
        async with asyncio.timeout(20):
            assert await reader.read() == b"\r\n"
        assert limits.ended["head"] == 1
        writer.close()


async def test_a_connection_that_closes_does_not_wait_for_a_reader_that_does_not_read() -> None:
    """Less than what makes uvicorn pause is left in its buffer."""
    async with endless_server(0, idle_seconds=0.2, reader_seconds=0.5) as (server, port, limits):
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(caller, ("127.0.0.1", port))
            await until(lambda: len(server.server_state.connections) == 1)
            (connection,) = server.server_state.connections
            assert isinstance(connection, BoundedConnection)
            # Fill the kernel's buffers past the point where the rest stays in the process, but is not much.
            connection.transport.set_write_buffer_limits(high=1 << 30)
            while connection.transport.get_write_buffer_size() == 0:
                connection.transport.write(b"x" * (1 << 14))
            assert connection.transport.get_write_buffer_size() < 1 << 16
            await until(lambda: limits.num_connections == 0)
        assert limits.ended["idle"] == limits.ended["reader"] == 1


@pytest.mark.parametrize("path", sorted(ENDLESS_PATHS))
async def test_an_open_page_does_not_hold_up_the_end_of_the_gateway(path: str) -> None:
    """Other answers have the whole grace."""
    async with endless_server(600) as (_, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % path.encode())
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
