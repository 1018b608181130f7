"""What it costs the manager that somebody watches: Watch's pictures against polling Describe, in the same run.

python -m bench.watching [--blocks 100000] [--viewers 8] [--hertz 5] [--seconds 10]

One manager in a process of its own serves a pool that is full of cached blocks, while a worker serves requests of 32 blocks that
evict as many. CPU time of the manager: of the load alone, with viewers on top, and with one client that pages through Describe
instead, as often. And the longest pause of the manager's loop: CPU time while a timer of 1 ms ran, an upper bound.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import grpc

from kvpool.cache_service.core.groups.dense import DenseSpec
from kvpool.cache_service.core.messages import (
    AllocateItem,
    Layout,
    Registration,
    Root,
    SequenceKey,
    SequenceUpdate,
    Uplink,
)
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.v1 import cache_pb2, cache_pb2_grpc

BLOCK_SIZE: Final = 16
BLOCKS_PER_REQUEST: Final = 32
REQUESTS_PER_SECOND: Final = 50
PAGE_BLOCKS: Final = 4096


class _Load:
    """A worker inside the manager's process, so that its calls cost no transport."""

    def __init__(self, server: ManagerServer, num_blocks: int) -> None:
        self._manager = server.manager
        registration = Registration("w", 1, 1, "", "bench", "bench", Layout(BLOCK_SIZE, (DenseSpec(num_blocks + 1),)))
        self._session = self._manager.register(registration, time.monotonic()).session
        self._num_calls = 0

    def serve(self) -> None:
        """One request with a prompt of its own: granted, computed, freed."""
        num_tokens = BLOCKS_PER_REQUEST * BLOCK_SIZE
        tokens = self._num_calls.to_bytes(4, "little") * num_tokens
        key = SequenceKey(f"s{self._num_calls}", 1, 0)
        self._manager.allocate(self._uplink(), [AllocateItem(key, Root("bench"), tokens)])
        self._manager.free(self._uplink(), [SequenceUpdate(key, num_tokens, b"", num_tokens)])

    def _uplink(self) -> Uplink:
        self._num_calls += 1
        return Uplink(self._session, self._num_calls)


def _serve(pipe: Connection, num_blocks: int) -> None:
    asyncio.run(_serve_until_told(pipe, num_blocks))


async def _serve_until_told(pipe: Connection, num_blocks: int) -> None:
    """Serve, and answer each message on the pipe with CPU seconds and the longest pause since the last one."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ManagerSettings(port=0, state_dir=Path(folder), lease_seconds=3600)
        async with ManagerServer(settings, FileEpochs.open(settings.state_folder)) as server:
            load = _Load(server, num_blocks)
            for _ in range(num_blocks // BLOCKS_PER_REQUEST):
                load.serve()
            pipe.send(server.port)
            longest = 0.0

            async def keep_busy() -> None:
                while True:
                    await asyncio.sleep(1 / REQUESTS_PER_SECOND)
                    load.serve()

            async def see_pauses() -> None:
                nonlocal longest
                while True:
                    before = time.thread_time()
                    await asyncio.sleep(0.001)
                    # CPU time, so that other processes of the machine do not count.
                    longest = max(longest, time.thread_time() - before)

            tasks = [asyncio.create_task(keep_busy()), asyncio.create_task(see_pauses())]
            while await asyncio.to_thread(pipe.recv):
                pipe.send((time.process_time(), longest))
                longest = 0.0
            for task in tasks:
                task.cancel()


async def _watch(stub: cache_pb2_grpc.CacheServiceStub, hertz: float) -> None:
    options = cache_pb2.PictureOptions(interval_ms=round(1000 / hertz), include_blocks=True, max_sequences=64)
    async for _ in stub.Watch(cache_pb2.WatchRequest(picture=options)):
        pass


async def _poll(stub: cache_pb2_grpc.CacheServiceStub, num_blocks: int, hertz: float) -> None:
    while True:
        due = time.monotonic() + 1 / hertz
        for first in range(1, num_blocks + 1, PAGE_BLOCKS):
            await stub.Describe(
                cache_pb2.DescribeRequest(worker_id="w", include_blocks=True, first_block=first, max_sequences=64)
            )
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _measure(pipe: Connection, arguments: argparse.Namespace) -> None:
    port = await asyncio.to_thread(pipe.recv)

    async def cost(name: str, make: Callable[[cache_pb2_grpc.CacheServiceStub], Awaitable[None]], count: int) -> float:
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("bench", place)]) for place in range(count)]
        tasks = [asyncio.ensure_future(make(cache_pb2_grpc.CacheServiceStub(channel))) for channel in channels]
        pipe.send(True)
        await asyncio.to_thread(pipe.recv)
        await asyncio.sleep(1)
        pipe.send(True)
        begin, first_pause = await asyncio.to_thread(pipe.recv)
        await asyncio.sleep(arguments.seconds)
        pipe.send(True)
        end, pause = await asyncio.to_thread(pipe.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
        share: float = (end - begin) / arguments.seconds
        print(
            f"{name:32} {share:7.2%} of a core, longest pause {pause * 1000:6.2f} ms "
            f"({first_pause * 1000:.2f} ms while they begin)"
        )
        return share

    alone = await cost("nobody watches", lambda stub: asyncio.sleep(0), 0)
    watched = await cost(f"{arguments.viewers} viewers", lambda stub: _watch(stub, arguments.hertz), arguments.viewers)
    polled = await cost("one client polls Describe", lambda stub: _poll(stub, arguments.blocks, arguments.hertz), 1)
    more, peer = watched - alone, polled - alone
    print(f"watching adds {more:.2%} of a core, polling {peer:.2%}: × {more / peer:.3f}")
    pipe.send(False)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.watching", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--viewers", type=int, default=8)
    parser.add_argument("--hertz", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, arguments.blocks))
    process.start()
    try:
        asyncio.run(_measure(ours, arguments))
    finally:
        process.join(10)
        if process.is_alive():
            process.terminate()


if __name__ == "__main__":
    main()
