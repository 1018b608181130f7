"""Attacks below gRPC: connections that are malformed, idle, reset in haste, or never read."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import grpc

from kvpool.v1 import worker_pb2
from tests import http2
from tests.cluster.cluster import MANAGER
from tests.hostile.arena import VICTIM, Arena
from tests.hostile.attack import OnDone, Outcome
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


async def malformed(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: OnDone) -> None:
    """Connections to manager and worker in turn that begin with what no HTTP/2 client sends cost nothing but themselves."""

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

    outcome.count(await at_once(count, one, on_done))


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


async def hold_idle(arena: Arena, outcome: Outcome, count: int) -> None:
    """Connections to manager and worker in turn that say nothing, half of them after a preface."""
    async with AsyncExitStack() as stack:

        async def one(number: int) -> str:
            try:
                connection = await http2.Connection.connect(arena.cluster.address((MANAGER, VICTIM)[number % 2]))
            except (OSError, TimeoutError):
                return "not accepted"
            stack.push_async_callback(connection.close)
            if number // 2 % 2:
                await connection.start()
            return "open"

        found = await at_once(count, one)
        outcome.count(found)
        await outcome.judge_next_to(arena, f"{count} idle connections", count - found["open"])


async def rapid_reset(
    arena: Arena, outcome: Outcome, seed: int, count: int, on_done: OnDone, streams_each: int
) -> None:
    """Streams that are opened and reset in one breath, Describe at the manager and Generate at the worker, take no other call with
    them. Nothing is drawn."""
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

    outcome.count(await at_once(count, one, on_done))


def _long_request(sequence_id: str, num_prompt_tokens: int) -> worker_pb2.GenerateRequest:
    return worker_pb2.GenerateRequest(
        sequence_id=sequence_id,
        attempt=1,
        token_ids=worker_pb2.TokenIds(ids=range(num_prompt_tokens)),
        stop=worker_pb2.StopConditions(max_tokens=450, ignore_eos=True),
        logprobs=20,
    )


SLOW_NAME: Final = "slow"
_STATUS: Final = re.compile(rb"grpc-status.(\d+)", re.DOTALL)
"""In a header block without Huffman codes, as grpcio writes it: name, length of the value, value."""


async def hold_unread(arena: Arena, outcome: Outcome, count: int, seconds: float) -> None:
    """Streams of Generate with a window of 0 bytes, so that the worker may send no message: it ends them within the time, frees
    their blocks, and says so to who reads at last."""
    async with AsyncExitStack() as stack:
        connections: list[http2.Connection] = []
        reading: list[asyncio.Task[bytes]] = []
        for number in range(count):
            connection = await http2.Connection.connect(arena.cluster.address(VICTIM))
            connections.append(await stack.enter_async_context(connection))
            await connection.start((http2.Setting.INITIAL_WINDOW_SIZE, 0))
            request = _long_request(f"{SLOW_NAME}-{time.monotonic_ns()}-{number}", 20)
            request.token_ids.ids[0] = number
            await connection.send(http2.call(GENERATE, request.SerializeToString()))
            reading.append(asyncio.create_task(_trailers(connection)))
            stack.callback(reading[-1].cancel)
        if left := await _until_freed(arena, count, seconds):
            outcome.problems.append(f"{left} of {count} streams that are not read hold blocks after {seconds:g} s")
        for connection in connections:
            await connection.send(http2.window_update(1 << 24), http2.window_update(1 << 24, stream=1))
        done, late = await asyncio.wait(reading, timeout=seconds)
    ends = Counter({"nothing": len(late)} if late else {})
    for task in done:
        status = _STATUS.search(task.result())
        ends["a reset" if status is None else f"status {status[1].decode()}"] += 1
    outcome.count(ends)
    others = count - ends[f"status {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}"]
    if others > 0:
        outcome.problems.append(f"{others} of {count} streams that were not read did not end with RESOURCE_EXHAUSTED")


async def _until_freed(arena: Arena, count: int, seconds: float) -> int:
    """Wait until every slow sequence has held blocks and none does; returns how many do after that time."""
    deadline = time.monotonic() + seconds
    seen: set[str] = set()
    while True:
        sequences = (await arena.described(VICTIM, max_sequences=1000)).sequences
        names = [sequence.key.sequence_id for sequence in sequences]
        left = {name for name in names if name.startswith(SLOW_NAME)}
        seen |= left
        # On a busy machine the first look may come before the worker has asked for their blocks.
        if (len(seen) == count and not left) or time.monotonic() > deadline:
            return len(left)
        await asyncio.sleep(0.2)


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
