"""The bound on a request's head, whose bytes come as the network cuts them; driven without a network."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from kvpool.gateway.connection import MAX_HEAD_BYTES, BoundedConnection, ConnectionLimits, bounded

LINE = b"X: " + b"x" * 995 + b"\r\n"
NUM_TOO_MANY = MAX_HEAD_BYTES // len(LINE) + 1


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def limits_of(max_connections: int = 10) -> ConnectionLimits:
    return ConnectionLimits(max_connections, 60.0, 60.0, 60.0, 60.0)


def connect(limits: ConnectionLimits) -> tuple[BoundedConnection, FakeTransport]:
    """One connection to an application that answers none of its requests."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    config = Config(app, lifespan="off", log_config=None)
    config.load()
    connection = bounded(limits)(config, ServerState(), {})
    transport = FakeTransport()
    connection.connection_made(transport)
    return connection, transport


async def ended(connection: BoundedConnection) -> None:
    """Its caller has gone."""
    connection.connection_lost(None)
    for task in connection.tasks.copy():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_head_that_comes_in_many_pieces_is_bounded_as_a_whole() -> None:
    limits = limits_of()
    connection, transport = connect(limits)
    connection.data_received(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
    for number in range(NUM_TOO_MANY):
        assert transport.written == b"", number
        connection.data_received(LINE)
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    assert limits.ended["head"] == 1
    await ended(connection)


async def test_a_head_that_comes_while_the_request_before_is_served_is_bounded_too() -> None:
    limits = limits_of()
    connection, transport = connect(limits)
    connection.data_received(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await asyncio.sleep(0)
    connection.data_received(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
    for _ in range(NUM_TOO_MANY):
        connection.data_received(LINE)
    assert limits.ended["head"] == 1
    assert transport.written.startswith(b"HTTP/1.1 431 ")
    await ended(connection)


async def test_a_body_is_no_part_of_the_head_that_it_comes_with() -> None:
    limits = limits_of()
    connection, transport = connect(limits)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (2 * MAX_HEAD_BYTES)
    connection.data_received(head + b"x" * (2 * MAX_HEAD_BYTES))
    assert (transport.written, limits.ended["head"]) == (b"", 0)
    await ended(connection)


async def test_a_connection_that_was_turned_away_gives_back_no_place() -> None:
    """It had none."""
    limits = limits_of(max_connections=1)
    served, _ = connect(limits)
    refused, transport = connect(limits)
    assert transport.written.startswith(b"HTTP/1.1 503 ")
    await ended(refused)
    assert limits.num_connections == 1
    await ended(served)
    assert limits.num_connections == 0
