"""Attacks on the gateway: requests that are malformed, forbidden or wrong, and connections that say or read nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

from tests import http2
from tests.hostile.arena import Arena
from tests.hostile.attack import OnDone, Outcome
from tests.hostile.connections import SLOW, at_once, drip
from tests.hostile.good_client import http_client

AT_ONCE: Final = 16
LINGER_SECONDS: Final = 0.3
"""How long a connection waits for what the gateway answers."""
RESET: Final = 0.2
"""Share of the connections that are reset at their end, with whatever is unread."""
_NO_LINGERING: Final = struct.pack("ii", 1, 0)
_CUT_OFF: Final = re.compile(r'connections_ended_total\{limit="reader"\} ([\d.e+]+)')

_LENGTHS: Final[tuple[int | str, ...]] = (0, 1, 5, -1, "x", "+5", 2**80)

Case = Callable[[random.Random], bytes]


def _request(
    method: str = "POST",
    path: str = "/v1/completions",
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    host: str = "127.0.0.1",
    length: int | str | None = None,
) -> bytes:
    """A request whose parts may contradict each other."""
    fields = {"Host": host, "Content-Length": len(body) if length is None else length, **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _wrong_value(draw: random.Random) -> Any:
    numbers = (True, -1, 0, 1e308, 2**63, 2**70)
    texts = ("", "x" * draw.randrange(5000), "\ud800")
    return draw.choice([None, *numbers, *texts, [], [[]], [None], {}, {"a": {}}])


_OPTIONS: Final = ("temperature", "n", "stop", "logprobs", "seed", "logit_bias", "stream", "model", "echo")


def _wrong_body(draw: random.Random) -> bytes:
    """Fields that exist, with values of any kind."""
    fields = ("prompt", "max_tokens", *_OPTIONS)
    wrong = {name: _wrong_value(draw) for name in draw.sample(fields, draw.randrange(1, 4))}
    return _request(body=_json({"prompt": [1, 2, 3], "max_tokens": 2} | wrong))


def _wrong_chat(draw: random.Random) -> bytes:
    message = {"role": _wrong_value(draw), "content": _wrong_value(draw)}
    body = {"messages": draw.choice([message, [message], [message, message], _wrong_value(draw)]), "max_tokens": 2}
    return _request(path="/v1/chat/completions", body=_json(body))


def _mutated(draw: random.Random) -> bytes:
    """A good request with some bytes changed."""
    good = bytearray(_request(body=_json({"prompt": [1, 2, 3], "max_tokens": 2})))
    for _ in range(draw.randrange(1, 8)):
        good[draw.randrange(len(good))] = draw.randrange(256)
    return bytes(good)


CASES: Final[tuple[Case, ...]] = (
    lambda draw: draw.randbytes(draw.randrange(1, 3000)),
    lambda draw: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(50),
    lambda draw: b"\x16\x03\x01\x02\x00\x01" + draw.randbytes(200),  # TLS
    lambda draw: b"GET / HTTP/9.9\r\n\r\n",
    lambda draw: b"GET /\r\n\r\n",
    lambda draw: _request("GET", "/" + "x" * draw.randrange(70_000), length=0),
    lambda draw: _request(
        "GET", "/health", headers={f"X-{number}": "y" * 100 for number in range(draw.randrange(800))}
    ),
    lambda draw: _request("GET", "/health", headers={"X-Big": "z" * draw.randrange(60_000, 90_000)}),
    lambda draw: _request(draw.choice(["BREW", "CONNECT", "TRACE", "PUT", "DELETE", "\xff"]), "/v1/models"),
    lambda draw: _request(host=draw.choice(["evil.example", "", "a" * 3000, "127.0.0.1.evil.example:80", "[::"])),
    lambda draw: _request(
        path="/api/drain", body=_json({"worker_id": "victim"}), headers={"Origin": "http://evil.example"}
    ),
    lambda draw: _request(path="/api/drain", body=b"", headers={"Sec-Fetch-Site": "cross-site"}),
    lambda draw: _request(body=b"{", length=1),
    lambda draw: _request(body=_json({"prompt": "x"}), length=draw.choice(_LENGTHS)),
    lambda draw: _request(body=b"{}", length=17 << 20),
    lambda draw: _request(headers={"Transfer-Encoding": "chunked"}, body=b"zz\r\n" + draw.randbytes(40)),
    lambda draw: _request(headers={"Transfer-Encoding": "chunked"}, body=b"5\r\nhello\r\n0\r\n\r\n"),
    lambda draw: _request(headers={"Transfer-Encoding": "chunked"}, body=b"0\r\n" + b"a: b\r\n" * draw.randrange(5000)),
    lambda draw: _request(headers={"host": draw.choice(["127.0.0.1", "evil.example"])}),
    lambda draw: b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    lambda draw: _request(body=b"[" * draw.randrange(1, 100_000)),
    lambda draw: _request(body=b'{"prompt": ' + b"9" * draw.randrange(1, 20_000) + b"}"),
    lambda draw: _request(body=b'{"prompt": "x", "temperature": NaN, "max_tokens": 1}'),
    lambda draw: _request(body=draw.randbytes(draw.randrange(2000))),
    lambda draw: _request(path="/login", body=b"key=" + draw.randbytes(20).hex().encode()),
    lambda draw: _request(
        "GET", f"/api/{draw.choice(['block', 'prefixes', 'requests', 'watch'])}?" + "worker_id=%ff&" * 20
    ),
    lambda draw: _request("GET", "/static/../settings.py") + _request("GET", "/static/%2e%2e/settings.py"),
    lambda draw: _request("GET", "/v1/models") * draw.randrange(2, 60),  # in one go
    lambda draw: _request(body=_json({"prompt": [1, 2], "max_tokens": 4, "stream": True})) + draw.randbytes(100),
    _wrong_body,
    _wrong_chat,
    _mutated,
)


async def malformed(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: OnDone) -> None:
    """Requests that are none, or not allowed, or wrong in what they ask for: no answer says that the gateway failed."""

    async def one(number: int) -> list[str]:
        draw = random.Random(f"{seed} {number}")
        return await _send(arena.gateway_url, CASES[number % len(CASES)](draw), draw)

    statuses = await at_once(count, one, on_done, AT_ONCE)
    outcome.count(statuses)
    if failed := sum(times for said, times in statuses.items() if said.startswith("5") and said not in ("503", "504")):
        outcome.problems.append(f"{failed} requests were answered that the gateway has failed")


async def _send(url: str, payload: bytes, draw: random.Random) -> list[str]:
    """Statuses of the answers that come; a word if none does."""
    try:
        reader, writer = await asyncio.open_connection(*_address(url))
    except OSError:
        return ["not accepted"]
    try:
        if draw.random() < SLOW:
            await drip(http2.Connection(reader, writer), payload[: draw.randint(1, 60)])
            return ["left in the middle"]
        writer.write(payload)
        answer = bytearray()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(LINGER_SECONDS):
                while part := await reader.read(1 << 16):
                    answer += part
        found = re.findall(rb"HTTP/1\.1 (\d{3})", answer)
        return [status.decode() for status in found] or ["no answer"]
    finally:
        await _leave(writer, reset=draw.random() < RESET)


async def _leave(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        with suppress(OSError):  # the gateway has reset it before
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@asynccontextmanager
async def idle(url: str, count: int) -> AsyncIterator[int]:
    """`count` connections at once; a third sends nothing, a third half a head, a third a head and half a body. Gives how many were
    accepted."""
    begun = (b"", b"POST /v1/completions HTTP/1.1\r\nHost: 127.0", _request(body=b'{"prompt', length=1000))
    num_open = 0
    async with AsyncExitStack() as stack:
        for number in range(count):
            with suppress(OSError):
                _, writer = await asyncio.open_connection(*_address(url))
                stack.push_async_callback(_leave, writer, reset=bool(number % 2))
                writer.write(begun[number % len(begun)])
                num_open += 1
        yield num_open


async def hold_idle(arena: Arena, outcome: Outcome, count: int) -> None:
    """Connections without a request, and with a part of one; meanwhile the gateway takes new ones and answers."""
    async with idle(arena.gateway_url, count) as num_open:
        outcome.said.append(f"{num_open:,} open")
        await outcome.judge_next_to(arena, f"{count} idle connections", count - num_open)


# A tenant of its own: that others wait for what was asked for first is no failure.
_LONG: Final = {
    "prompt": list(range(1, 251)),
    "max_tokens": 1,
    "n": 32,
    "echo": True,
    "logprobs": 20,
    "user": "attacker",
}
_LONG_ANSWER: Final = _request(body=_json(_LONG | {"stream": True}))
"""Some megabytes each."""
_EVENT_STREAM: Final = _request("GET", "/api/watch")
"""Of the page."""


@asynccontextmanager
async def _unread(url: str, count: int, payload: bytes) -> AsyncIterator[None]:
    """`count` connections that ask with this payload, and read nothing."""
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.socket()
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setblocking(False)
            await loop.sock_connect(one, _address(url))
            await loop.sock_sendall(one, payload)
        yield
    finally:
        for one in sockets:
            one.close()


async def _num_cut_off(url: str) -> int:
    """How many connections the gateway has closed because their readers took nothing."""
    async with http_client(url, 30.0) as client:
        found = _CUT_OFF.search((await client.get("/metrics")).text)
        return 0 if found is None else round(float(found[1]))


async def hold_unread(arena: Arena, outcome: Outcome, count: int, seconds: float) -> None:
    """Long answers that nobody reads: the gateway closes their connections within the time."""
    url = arena.gateway_url
    total = await _num_cut_off(url) + count
    left = total
    async with _unread(url, count, _LONG_ANSWER):
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while left := max(0, total - await _num_cut_off(url)):
                    await asyncio.sleep(0.1)
    if left:
        outcome.problems.append(f"{left} of {count} readers that stopped have a connection after {seconds:g} s")


async def hold_viewers(arena: Arena, outcome: Outcome, count: int) -> None:
    """Event streams of the page that nobody reads; meanwhile the gateway answers."""
    async with _unread(arena.gateway_url, count, _EVENT_STREAM):
        await outcome.judge_next_to(arena, f"{count} viewers")
