"""A cluster and its gateway, for tests whose own calls block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypeVar

from kvpool.client import Client
from kvpool.gateway.server import GatewayServer
from kvpool.gateway.settings import GatewaySettings
from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model

WORKERS: Final = ("worker-0", "worker-1")
NUM_BLOCKS: Final = 257
BLOCK_SIZE: Final = 4
STEP_SECONDS: Final = 0.01
"""What a step takes longer: a person must have the time to stop an answer."""
T = TypeVar("T")


class Served:
    """A cluster of two tiny workers and a gateway, on a loop in a thread of their own: the browser's calls block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served", daemon=True)
        self._stack = AsyncExitStack()
        self.cluster: Cluster
        self.client: Client
        self.url = ""

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 240) -> T:
        """The result of work on that loop."""
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(seconds)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        self.cluster = await self._stack.enter_async_context(Cluster(self._folder, lease_seconds=3.0))
        model = make_endless_model(self._folder / "model", tokenizer=True)
        settings = {
            "model": model.path,
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "step_seconds": STEP_SECONDS,
        }
        await self.cluster.start(dict.fromkeys(WORKERS, settings))
        self.client = await self._stack.enter_async_context(Client(self.cluster.address()))
        gateway = GatewayServer(GatewaySettings(manager=self.cluster.address(), port=0))
        await self._stack.enter_async_context(gateway)
        self.url = gateway.url

    def stop(self) -> None:
        self.run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: str, max_tokens: int = 8) -> int:
        """One answer; returns how many of the prompt's tokens the cache served."""

        async def ask() -> int:
            answer = await self.client.generate(prompt, max_tokens=max_tokens, ignore_eos=True).collect()
            return answer.num_cached_tokens

        return self.run(ask())
