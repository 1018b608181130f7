"""What a stranger can make a gateway collect or compute before it is judged, each with its bounds of memory and CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from tests.cluster.cluster import GATEWAY, free_port
from tests.hostile.arena import Arena
from tests.hostile.attack import Attack, Outcome, bounded
from tests.hostile.good_client import http_client
from tests.hostile.over_http import idle

FLOOD_SECONDS: Final = 3.0
ANSWER_SECONDS: Final = 60.0
NUM_IDLE: Final = 1150
SOFT_LIMIT: Final = 1024
"""`ulimit -n` of many shells."""
MAX_LINES: Final = 20
SIXTEEN_MB: Final = 16_000_000
TRAILERS: Final = (b"a: b\r\n", b"a:\r\n", b"a")
WRONG_BODIES: Final[tuple[Callable[[], bytes], ...]] = (
    lambda: b'{"prompt": "a", "stop": [' + b"1," * (SIXTEEN_MB // 2 - 20) + b"1]}",
    lambda: b'{"prompt": [' + b'"1",' * 500_000 + b"1]}",
    lambda: b'{"prompt": "a", "logit_bias": {"1": 1' + b"".join(b',"%x": 1' % key for key in range(1_200_000)) + b"}}",
    lambda: b'{"prompt": [' + b'"",' * (SIXTEEN_MB // 3 - 20) + b"1]}",
    lambda: b'{"prompt": "a"' + b"".join(b',"%x": 1' % key for key in range(1_200_000)) + b"}",
)
TEXTS: Final = (
    ("/v1/completions", b'{"prompt": "%s"}'),
    ("/tokenize", b'{"prompt": "%s"}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "%s"}]}'),
)


async def _flood(arena: Arena, begin: bytes, piece: bytes) -> bytes:
    """Send pieces without end; what comes back until the gateway ends the connection, or the time is over."""
    url = urlsplit(arena.gateway_url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    answer = bytearray()

    async def read() -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                answer.extend(part)

    reading = asyncio.create_task(read())
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(FLOOD_SECONDS):
            writer.write(begin)
            while not reading.done():
                writer.write(piece * 4096)
                await writer.drain()
                await asyncio.sleep(0)
    reading.cancel()
    writer.close()
    return bytes(answer)


async def trailers_without_end(arena: Arena, outcome: Outcome) -> None:
    """Refused after some KiB, with and without a line end in them."""
    with bounded(arena, outcome, GATEWAY, most_mb=32, most_cpu_seconds=2.0):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        answers = await asyncio.gather(*(_flood(arena, head, piece) for piece in TRAILERS * 2))
        if not all(answer.startswith(b"HTTP/1.1 431") for answer in answers):
            outcome.problems.append(f"answered {[answer[:12] for answer in answers]}")


async def pipelined_without_end(arena: Arena, outcome: Outcome) -> None:
    """Requests that do not wait for answers: few are taken, and the connection ends."""
    with bounded(arena, outcome, GATEWAY, most_mb=48, most_cpu_seconds=3.0):
        asked = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answers = await asyncio.gather(*(_flood(arena, b"", asked) for _ in range(4)))
        if not all(b"HTTP/1.1 429" in answer for answer in answers):
            outcome.problems.append("requests wait on one connection without a bound")


async def bodies_of_wrong_types(arena: Arena, outcome: Outcome) -> None:
    """Refused for their first error, or for the number of their values."""
    with bounded(arena, outcome, GATEWAY, most_mb=192, most_cpu_seconds=8.0):
        async with http_client(arena.gateway_url, ANSWER_SECONDS) as client:
            for make in WRONG_BODIES:
                answer = await client.post("/v1/completions", content=make())
                outcome.said.append(str(answer.status_code))
                if answer.status_code != 400 or len(answer.content) > 2000:
                    outcome.problems.append(f"answered {answer.status_code}: {answer.text[:200]}")


async def texts_of_16_mb(arena: Arena, outcome: Outcome) -> None:
    """Six at a time, refused before they are tokenised or rendered."""
    with bounded(arena, outcome, GATEWAY, most_mb=768, most_cpu_seconds=10.0):
        text = b"hello world " * (SIXTEEN_MB // 12)
        async with http_client(arena.gateway_url, ANSWER_SECONDS) as client:
            answers = await asyncio.gather(
                *(client.post(path, content=body % text) for path, body in TEXTS * 2), return_exceptions=True
            )
        for answer in answers:
            outcome.said.append(repr(answer) if isinstance(answer, BaseException) else str(answer.status_code))
            # 408: this machine is too busy to send it within the second that the arena's gateway gives a body.
            if isinstance(answer, BaseException) or answer.status_code not in (400, 408, 503):
                outcome.problems.append(f"answered {answer!r}")


async def idle_at_the_limit_of_descriptors(arena: Arena, outcome: Outcome) -> None:
    """More idle connections than `ulimit -n`: a gateway raises its limit. If it may not, it takes fewer and tells others."""
    for hard in (None, SOFT_LIMIT):
        async with (
            _gateway(arena, hard) as (url, log),
            idle(url, NUM_IDLE),
            http_client(url, ANSWER_SECONDS) as client,
        ):
            try:
                status = (await client.get("/version")).status_code
            except (httpx.ReadError, httpx.RemoteProtocolError):
                status = 0  # closed without a word, as where many are told that there are too many
            except httpx.TransportError as error:
                status = -1
                outcome.problems.append(f"it is deaf: {error!r}")
            if status not in ((200,) if hard is None else (0, 503)):
                outcome.problems.append(f"next to {NUM_IDLE} idle connections it answered {status}")
        lines = log.read_text().count("\n")
        outcome.said.append(f"{status}, {lines} log lines")
        if lines > MAX_LINES:
            outcome.problems.append(f"the gateway logged {lines} lines, more than {MAX_LINES}")


@asynccontextmanager
async def _gateway(arena: Arena, hard: int | None) -> AsyncIterator[tuple[str, Path]]:
    """One more, with a soft limit of descriptors, and a hard one."""
    port = free_port()
    log = arena.cluster.processes[GATEWAY].log_path.with_name(f"limited-{hard}-{port}.log")

    # Not by code of ours between fork and exec, which may wait for ever for a lock that another thread of this process had.
    limit = f"ulimit -S -n {SOFT_LIMIT}" + ("" if hard is None else f"; ulimit -H -n {hard}")
    arguments: Sequence[str] = ("--manager", arena.cluster.address(), "--port", str(port), "--log-level", "warning")
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f'{limit}; exec "$@"', "sh"),
            *(sys.executable, "-m", "kvpool.gateway", *arguments),
            stdout=file,
            stderr=file,
            env=dict(os.environ),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        async with http_client(url, 5.0) as client, asyncio.timeout(ANSWER_SECONDS):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    await client.get("/version")
                    break
                await asyncio.sleep(0.1)
        yield url, log
    finally:
        process.kill()
        await process.wait()


GATEWAY_SINGLES: Final = (
    Attack("HTTP: trailers without end", trailers_without_end, is_as_calm=True),
    Attack("HTTP: pipelined requests without end", pipelined_without_end, is_as_calm=True),
    Attack("HTTP: bodies of wrong types", bodies_of_wrong_types, is_as_calm=True),
    Attack("HTTP: texts of 16 MB", texts_of_16_mb, is_as_calm=True),
    Attack("HTTP: idle at the limit of descriptors", idle_at_the_limit_of_descriptors, is_as_calm=True),
)
