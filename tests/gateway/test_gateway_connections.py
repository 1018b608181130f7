"""Connections that hold a gateway up: each stage of a request has a time, and nothing is unbounded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json

import pytest

from kvpool.gateway import connection
from kvpool.gateway import server as gateway_server
from kvpool.gateway.connection import MAX_HEAD_BYTES, MAX_PIPELINED, MAX_TRAILER_BYTES
from tests.gateway.serving import calling, exchange, head, serving

WHOLE = head("GET /version")
LAST = head("GET /version", "Connection: close")
CHUNKED = "Transfer-Encoding: chunked"


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


async def test_an_idle_connection_is_closed_and_half_a_body_and_a_line_end_are_not_waited_for() -> None:
    async with serving(idle_seconds=0.2, head_seconds=0.3, body_seconds=0.3) as server:
        assert await exchange(server.port, b"") == b""
        assert status_of(await exchange(server.port, WHOLE)) == 200
        for half in (b"\r\n", head("POST /tokenize", "Content-Length: 100") + b"{"):
            assert status_of(await exchange(server.port, half)) == 408


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("GET /version", "X: " + "x" * (2 * MAX_HEAD_BYTES)), 431),
        (b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), 431),
        (b"this is not HTTP\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (head("POST /tokenize", "Content-Length: 99999999999", "Connection: close"), 413),
        (head("POST /tokenize", CHUNKED, "Connection: close") + b"4000\r\n" + b"x" * 0x4000 + b"\r\n", 413),
        # Its rest does not come; when its time is over the connection ends.
        (head("POST /v1/completions", "Content-Length: 5000") + b"x" * 10, 413),
        # Two programs may read these in two ways, and a proxy may have let them pass for another one.
        (head("POST /tokenize", CHUNKED).replace(b"/1.1", b"/1.0") + b"0\r\n\r\n", 400),
        (head("POST /version", "Transfer-Encoding: identity").replace(b"/1.1", b"/1.0"), 400),
        (head("GET /version", "Host: evil.example"), 400),
        (head("GET /version", "host: localhost"), 400),
    ],
)
async def test_what_is_too_large_or_no_request_is_refused_once_and_in_openais_form(raw: bytes, status: int) -> None:
    async with serving(max_body_bytes=4096, idle_seconds=0.3, body_seconds=0.3) as server:
        answer = await exchange(server.port, raw)
        assert (status_of(answer), answer.count(b"content-length")) == (status, 1)
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
            while status_of(await exchange(server.port, LAST)) != 200:
                pass
        held[1][1].close()


async def test_an_unknown_path_or_method_is_answered_in_openais_form_and_not_repeated_at_length() -> None:
    async with calling() as client:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
            answer = await client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["type"]
        for method in ("GET", "POST"):
            assert len((await client.request(method, "/" + "x" * 5000)).content) < 1000


async def test_a_request_keeps_its_id_and_one_without_gets_one() -> None:
    async with calling() as client:
        assert (await client.get("/version", headers={"X-Request-Id": "mine-1"})).headers["x-request-id"] == "mine-1"
        for strange in ("", "a b", "x" * 200):
            given = (await client.get("/version", headers={"X-Request-Id": strange})).headers["x-request-id"]
            assert given not in ("", strange)


async def test_metrics_count_routes_and_never_what_a_caller_invents() -> None:
    async with calling() as client:
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
    asked = head("POST /v1/completions", "Content-Length: 11") + b'{"prompt": '
    async with serving() as server:
        answer = await exchange(server.port, asked + b"\x00garbage")
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1 ") == 1 + 1, "a head, and a word in its message"
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("keys", [[], ["a-key-of-this-test"]], ids=["open", "key"])
@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\n{}\r\n0\r\n", b"a: b\r\n"),
        (b"0\r\n", b"a:\r\n"),
        (b"0\r\na: ", b"b"),
        (b"0\r\n", b"a"),
        (b"2;", b"a"),
        (b"2;a=", b"b"),
    ],
    ids=["trailers", "empty trailers", "value", "name", "extension", "extension's value"],
)
async def test_what_follows_a_chunk_is_not_collected(begin: bytes, piece: bytes, keys: list[str]) -> None:
    """The connection ends after some KiB of it, long before the body's time; its head has one answer."""
    async with serving(api_key=keys, body_seconds=600) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("POST /tokenize", CHUNKED) + begin)
        answer = await reader.readuntil(b"\r\n\r\n") if keys else b""

        async def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    writer.write(piece * 1024)
                    await writer.drain()
                    await asyncio.sleep(0)

        sending = asyncio.create_task(send())
        with contextlib.suppress(OSError):
            async with asyncio.timeout(20):
                while more := await reader.read(1000):
                    answer += more
        sending.cancel()
        writer.close()
        assert answer.count(b"HTTP/1.1 ") == 1
        assert status_of(answer) == (401 if keys else 431)
        assert status_of(await exchange(server.port, LAST)) == 200, "the next one is served"


@pytest.mark.parametrize("num_bytes", [MAX_TRAILER_BYTES // 2, MAX_TRAILER_BYTES + 1])
async def test_trailers_are_dropped_up_to_their_bound(num_bytes: int) -> None:
    """Of a request that is complete, whatever its pieces are."""
    trailers = b"x-a: b\r\n" * (num_bytes // 8) + b"x: " + b"y" * (num_bytes % 8) + b"\r\n\r\n"
    async with serving() as server:
        asked = head("POST /tokenize", CHUNKED, "Connection: close") + b"2\r\n{}\r\n0\r\n" + trailers
        answer = await exchange(server.port, asked)
        assert status_of(answer) == (400 if num_bytes <= MAX_TRAILER_BYTES else 431)
        assert (b"needed either prompt or messages" in answer) == (num_bytes <= MAX_TRAILER_BYTES)


async def test_requests_that_wait_on_one_connection_are_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    """All within the bound are answered in turn; one more ends the connection, and with it those that wait."""
    async with serving() as server:
        answer = await exchange(server.port, WHOLE * MAX_PIPELINED + LAST)
        assert answer.count(b"HTTP/1.1 200") == MAX_PIPELINED + 1
        answer = await exchange(server.port, WHOLE * (4 * MAX_PIPELINED))
        assert answer.count(b"HTTP/1.1 200") <= MAX_PIPELINED
        assert answer.count(b"HTTP/1.1 429") == 1
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_those_that_are_turned_away_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told why as long as few are told at a time; else a descriptor for each would be needed."""
    monkeypatch.setattr(connection, "_CLOSING_SECONDS", 60.0)
    monkeypatch.setattr(connection, "MAX_REFUSED", 2)
    async with serving(max_connections=1) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port)]
        held[0][1].write(WHOLE)
        assert await held[0][0].readuntil(b"\r\n\r\n")
        answers = []
        for _ in range(5):
            held.append(await asyncio.open_connection("127.0.0.1", server.port))
            try:
                answers.append(await held[-1][0].read())
            except ConnectionResetError:
                answers.append(b"")
        assert [answer[:12] for answer in answers] == [b"HTTP/1.1 503"] * 2 + [b""] * 3
        for _, writer in held:
            writer.close()


async def test_a_gateway_takes_as_many_connections_as_it_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -n` is 1024 in many shells; a gateway without a descriptor left would hear nobody."""
    raised: list[int] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 1100))
    monkeypatch.setattr("resource.setrlimit", lambda _, to: raised.append(to[0]))
    async with calling() as client:
        assert raised == [1100]
        assert "kvpool_gateway_max_connections 972.0" in (await client.get("/metrics")).text


async def test_connections_that_cannot_be_taken_are_one_line_a_minute(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving():
        loop = asyncio.get_running_loop()
        for _ in range(500):
            error = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": error})
        loop.call_exception_handler({"message": "something else", "exception": OSError(errno.EPIPE, "no pipe")})
    said = "".join(capfd.readouterr())
    assert said.count("Too many open files") == 1
    assert gateway_server._BACKLOG <= 128, "as often as that the loop tries to take one"
