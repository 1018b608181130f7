"""Attacks below gRPC: connections that are malformed, idle, reset in haste, or never read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

from kvpool.v1 import worker_pb2
from tests import http2
from tests.cluster.cluster import MANAGER
from tests.hostile.arena import VICTIM, Arena
from tests.hostile.malformed import CASES

AT_ONCE: Final = 32
LINGER_SECONDS: Final = 0.05
"""How long a malformed connection waits for what the server does about it."""
REBUILT_SECONDS: Final = 3.0
"""For a server that a malformed connection has ended to be there again."""
SLOW: Final = 0.02
"""Share of the malformed connections that send their bytes one by one, and leave in the middle."""
SLOW_SECONDS: Final = 1.0
GENERATE: Final = b"/kvpool.v1.WorkerService/Generate"
DESCRIBE: Final = b"/kvpool.v1.CacheService/Describe"

OnDone = Callable[[int], None]


async def at_once(
    count: int,
    one: Callable[[int], Awaitable[str | list[str]]],
    on_done: OnDone = lambda done: None,
    num_tasks: int = AT_ONCE,
) -> Counter[str]:
    """Run one(0) … one(count − 1), `num_tasks` at a time; counts what they return."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(count))

    async def run() -> None:
        for number in numbers:
            said = await one(number)
            outcomes.update([said] if isinstance(said, str) else said)
            on_done(number + 1)

    async with asyncio.TaskGroup() as running:
        for _ in range(num_tasks):
            running.create_task(run())
    return outcomes


async def malformed(arena: Arena, seed: int, count: int, on_done: OnDone) -> Counter[str]:
    """`count` connections to manager and worker in turn. Returns how many of them were closed, left open or refused."""

    async def one(number: int) -> str:
        draw = random.Random(f"{seed} {number}")
        payload = CASES[number % len(CASES)](draw)
        connection = await _connect(arena.cluster.address((MANAGER, VICTIM)[number // len(CASES) % 2]))
        if connection is None:
            return "not accepted"
        async with connection:
            if draw.random() < SLOW:
                await drip(connection, payload[: draw.randint(1, 60)])
                return "left in the middle"
            await connection.send(payload)
            return "closed" if await connection.read_until_end(LINGER_SECONDS) else "left open"

    return await at_once(count, one, on_done)


async def _connect(address: str) -> http2.Connection | None:
    """None if nothing listens there for REBUILT_SECONDS: some of the connections end a server, which is then replaced."""
    deadline = time.monotonic() + REBUILT_SECONDS
    while True:
        try:
            return await http2.Connection.connect(address)
        except (OSError, TimeoutError):
            if time.monotonic() > deadline:
                return None
        await asyncio.sleep(0.05)


async def drip(connection: http2.Connection, payload: bytes) -> None:
    """Send byte by byte, in SLOW_SECONDS, as far as they are taken."""
    for at in range(len(payload)):
        if not await connection.send(payload[at : at + 1]):
            break
        await asyncio.sleep(SLOW_SECONDS / len(payload))


@asynccontextmanager
async def idle(arena: Arena, count: int) -> AsyncIterator[Counter[str]]:
    """`count` connections that say nothing, half of them after a preface; `count` in all, to manager and worker in turn."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(number: int) -> str:
            try:
                connection = await http2.Connection.connect(arena.cluster.address((MANAGER, VICTIM)[number % 2]))
            except (OSError, TimeoutError):
                return "not accepted"
            stack.push_async_callback(connection.close)
            if number // 2 % 2:
                await connection.start()
            return "open"

        yield await at_once(count, one)


async def rapid_reset(arena: Arena, num_connections: int, streams_each: int, on_done: OnDone) -> Counter[str]:
    """Streams that are opened and reset in one breath: Describe at the manager, Generate at the worker."""
    request = _long_request("reset", 4).SerializeToString()

    async def one(number: int) -> str:
        name, path, payload = ((MANAGER, DESCRIBE, b""), (VICTIM, GENERATE, request))[number % 2]
        try:
            connection = await http2.Connection.connect(arena.cluster.address(name))
        except (OSError, TimeoutError):
            return "not accepted"
        async with connection:
            await connection.start()
            for stream in range(1, 2 * streams_each, 2):
                if not await connection.send(http2.call(path, payload, stream) + http2.reset(stream)):
                    return "closed by the server"
                if stream % 64 == 1:
                    await asyncio.sleep(0)
            await connection.read_until_end(LINGER_SECONDS)
            return "all sent"

    return await at_once(num_connections, one, on_done)


def _long_request(sequence_id: str, num_prompt_tokens: int) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(
        sequence_id=sequence_id,
        attempt=1,
        token_ids=worker_pb2.TokenIds(ids=range(num_prompt_tokens)),
        stop=worker_pb2.StopConditions(max_tokens=450, ignore_eos=True),
        logprobs=20,
    )


class SlowReaders:
    """Streams of Generate with a window of 0 bytes: the worker may send no message. `async with` opens them."""

    def __init__(self, arena: Arena, count: int) -> None:
        self._arena = arena
        self._count = count
        self._connections: list[http2.Connection] = []
        self._reading: list[asyncio.Task[bytes]] = []

    async def __aenter__(self) -> SlowReaders:
        address = self._arena.cluster.address(VICTIM)
        for number in range(self._count):
            connection = await http2.Connection.connect(address)
            self._connections.append(connection)
            await connection.start((http2.Setting.INITIAL_WINDOW_SIZE, 0))
            request = _long_request(f"{SLOW_NAME}-{time.monotonic_ns()}-{number}", 20)
            request.token_ids.ids[0] = number
            await connection.send(http2.call(GENERATE, request.SerializeToString()))
            self._reading.append(asyncio.create_task(_trailers(connection)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for connection in self._connections:
            await connection.close()

    async def until_freed(self, seconds: float) -> int:
        """Wait until every sequence of theirs has held blocks and none does; returns how many do after that time."""
        deadline = time.monotonic() + seconds
        seen: set[str] = set()
        while True:
            sequences = (await self._arena.described(VICTIM, max_sequences=1000)).sequences
            names = [sequence.key.sequence_id for sequence in sequences]
            left = {name for name in names if name.startswith(SLOW_NAME)}
            seen |= left
            # On a busy machine the first look may come before the worker has asked for their blocks.
            if (len(seen) == self._count and not left) or time.monotonic() > deadline:
                return len(left)
            await asyncio.sleep(0.2)

    async def statuses(self, seconds: float) -> Counter[str]:
        """Read at last, and return what the streams were ended with: a gRPC status, or nothing within the time."""
        for connection in self._connections:
            await connection.send(http2.window_update(1 << 24), http2.window_update(1 << 24, stream=1))
        _, late = await asyncio.wait(self._reading, timeout=seconds)
        found: Counter[str] = Counter({"nothing": len(late)} if late else {})
        for task in set(self._reading) - late:
            status = _STATUS.search(task.result())
            found["a reset" if status is None else f"status {status[1].decode()}"] += 1
        return found


SLOW_NAME: Final = "slow"
_STATUS: Final = re.compile(rb"grpc-status.(\d+)", re.DOTALL)
"""In a header block without Huffman codes, as grpcio writes it: name, length of the value, value."""


async def _trailers(connection: http2.Connection) -> bytes:
    """The header block that ends stream 1; empty if the stream is reset, or the connection ends."""
    while frame := await connection.read_frame(3600.0):
        if frame.kind == http2.Kind.PING and not frame.flags & http2.Flag.ACK:
            # Unanswered, the peer would take us for dead and close the connection itself.
            await connection.send(http2.frame(http2.Kind.PING, http2.Flag.ACK, 0, frame.payload))
        if frame.stream == 1 and frame.kind == http2.Kind.RST_STREAM:
            return b""
        if frame.stream == 1 and frame.kind == http2.Kind.HEADERS and frame.flags & http2.Flag.END_STREAM:
            return frame.payload
    return b""
