"""kvpool's engine at the other end of a pipe: worker and manager in one process, without gRPC.

Only the wire is left out: the engine uses the same link and the same messages, which are passed in memory. The arguments are those
of `kvpool worker`.

python -m bench.our_engine_peer --model smollm2 …
"""

from __future__ import annotations

from bench.pipe import Child, take_stdout

_pipe = take_stdout()

import asyncio  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import AsyncGenerator  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import cast  # noqa: E402
from uuid import uuid4  # noqa: E402

from bench.local_stub import LocalStub  # noqa: E402
from kvpool.cache_service.core.manager import CacheManager  # noqa: E402
from kvpool.cache_service.election.file import FileEpochs  # noqa: E402
from kvpool.cache_service.servicer import CacheServicer  # noqa: E402
from kvpool.process.settings import load_settings  # noqa: E402
from kvpool.v1 import cache_pb2_grpc, worker_pb2  # noqa: E402
from kvpool.worker_service import codec  # noqa: E402
from kvpool.worker_service.server import WorkerServer  # noqa: E402
from kvpool.worker_service.settings import WorkerSettings  # noqa: E402

KEEP_ALIVE_SECONDS = 1.0


class OurEngine:
    """A worker's engine and a manager's core, in this loop."""

    def __init__(self, server: WorkerServer) -> None:
        self.server = server

    async def generate(self, prompt: list[int], num_tokens: int) -> AsyncGenerator[tuple[list[int], int | None], None]:
        """Greedy tokens, past any end of text."""
        engine = self.server.engine
        asked = worker_pb2.GenerateRequest(
            sequence_id=str(uuid4()),
            attempt=1,
            token_ids=worker_pb2.TokenIds(ids=prompt),
            stop=worker_pb2.StopConditions(max_tokens=num_tokens, ignore_eos=True),
        )
        request = engine.submit(codec.decode_generate(asked, engine.prompts))
        try:
            while (chunk := await request.stream.get()) is not None:
                cached = None if chunk.usage is None else chunk.usage.num_cached_tokens
                yield [token.token_id for token in chunk.tokens], cached
        finally:
            engine.abort(request)


async def serve(settings: WorkerSettings) -> None:
    """Load and serve."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        epochs = FileEpochs.open(Path(folder))
        servicer = CacheServicer(
            CacheManager(epochs.epoch), epochs, keep_alive_seconds=KEEP_ALIVE_SECONDS, clock=time.monotonic
        )
        server = await WorkerServer.load(settings)
        # Its port is bound and not served. The link is the worker's own, with another stub.
        link = server._link
        tasks = [
            asyncio.create_task(server.engine.run()),
            asyncio.create_task(link.talk_to(cast(cache_pb2_grpc.CacheServiceStub, LocalStub(servicer)))),
        ]
        while not server.engine.cache.is_ready():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # there is no event for it
        try:
            await Child(_pipe, OurEngine(server).generate).serve(
                {"engine": f"kvpool {version('kvpool')}", "torch": version("torch")}
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            epochs.close()


def main() -> None:
    asyncio.run(serve(load_settings(WorkerSettings, sys.argv[1:])))


if __name__ == "__main__":
    main()
