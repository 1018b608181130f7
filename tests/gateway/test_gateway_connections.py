"""Connections that hold a gateway up: each stage of a request has a time, and nothing is unbounded."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from kvpool.gateway.connection import MAX_HEAD_BYTES
from tests.gateway.serving import exchange, serving

WHOLE = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


async def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    """Single bytes do not renew the time."""
    async with serving(head_seconds=0.3) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def trickle() -> None:
            with contextlib.suppress(OSError):
                for byte in b"GET /version HTTP/1.1\r\nX-Slow: " + b"x" * 10_000:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(20):
            answer = await reader.read()
        trickling.cancel()
        writer.close()
        assert status_of(answer) == 408
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("a request's head")


async def test_half_a_body_is_not_waited_for() -> None:
    async with serving(body_seconds=0.3) as server:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
        assert status_of(await exchange(server.port, head)) == 408


async def test_an_idle_connection_is_closed_and_a_line_end_is_no_request() -> None:
    async with serving(idle_seconds=0.2, head_seconds=0.3) as server:
        assert await exchange(server.port, b"") == b""
        assert status_of(await exchange(server.port, WHOLE)) == 200
        assert status_of(await exchange(server.port, b"\r\n")) == 408


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), 431),
        (b"this is not HTTP\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n", 413),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
         b"4000\r\n" + b"x" * 0x4000 + b"\r\n", 413),
    ],
)  # fmt: skip
async def test_what_is_too_large_or_no_request_is_refused_in_openais_form(raw: bytes, status: int) -> None:
    async with serving(max_body_bytes=4096, idle_seconds=1, body_seconds=1) as server:
        answer = await exchange(server.port, raw)
        assert status_of(answer) == status
        assert "message" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert status_of(await exchange(server.port, WHOLE)) == 200, "the next one is served"


async def test_more_connections_than_allowed_are_turned_away_and_the_next_is_served() -> None:
    async with serving(max_connections=2) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for reader, writer in held:
            writer.write(WHOLE)
            assert await reader.readuntil(b"\r\n\r\n")
        assert status_of(await exchange(server.port, WHOLE)) == 503
        held[0][1].close()
        async with asyncio.timeout(20):
            while (
                status_of(await exchange(server.port, WHOLE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")))
                != 200
            ):
                pass
        held[1][1].close()


async def test_an_unknown_path_or_method_is_answered_in_openais_form() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"]


async def test_a_request_keeps_its_id_and_one_without_gets_one() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/version", headers={"X-Request-Id": "mine-1"})).headers["x-request-id"] == "mine-1"
        for strange in ("", "a b", "x" * 200):
            given = (await client.get("/version", headers={"X-Request-Id": strange})).headers["x-request-id"]
            assert given not in ("", strange)


async def test_metrics_count_routes_and_never_what_a_caller_invents() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        for path in ("/version", "/version", "/made-up/x", "/made-up/y"):
            await client.get(path)
        page = (await client.get("/metrics")).text
        assert 'kvpool_gateway_requests_total{route="/version",status="200"} 2.0' in page
        assert 'route="other",status="404"} 2.0' in page
        assert "made-up" not in page


async def test_garbage_after_a_request_ends_the_request_too_and_nothing_fails(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is refused while the request before it is served: nobody writes to the connection after that."""
    body = b'{"prompt": '
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving() as server:
        answer = await exchange(server.port, head + body + b"\x00garbage")
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1 + 1, "a head, and a word in its message"
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_a_body_that_was_refused_and_does_not_come_gets_no_second_answer() -> None:
    """Its 413 was sent; when its time is over the connection ends."""
    async with serving(max_body_bytes=1024, body_seconds=0.3) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n"
        answer = await exchange(server.port, head + b"x" * 10)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert status_of(answer) == 413


async def test_an_error_repeats_no_long_path() -> None:
    async with serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        for method in ("GET", "POST"):
            assert len((await client.request(method, "/" + "x" * 5000)).content) < 1000
