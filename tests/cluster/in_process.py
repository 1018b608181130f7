"""A manager and a worker in the test's own process, over real gRPC: for tests that look at tensors and counters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.client import Client, Completion, GenerateOptions
from kvpool.v1 import cache_pb2
from kvpool.worker_service.server import WorkerServer
from kvpool.worker_service.settings import WorkerSettings
from tests.cache_service.edge.conftest import running
from tests.until import eventually, until

WORKER = "worker"
TIGHT = {"block_size": 4, "num_blocks": 21, "max_num_batched_tokens": 7, "max_num_seqs": 5}
"""Settings of a worker: chunks of 7, and a pool that holds the longest sequence of a tiny model's prompts (14 blocks) but never
those of all five (47)."""


@dataclass(frozen=True)
class InProcessCluster:
    manager: ManagerServer
    worker: WorkerServer
    client: Client

    async def complete(self, prompt: Sequence[int] | str, **options: Unpack[GenerateOptions]) -> Completion:
        """One whole answer; goes on behind any end of text."""
        asked: GenerateOptions = {"ignore_eos": True, **options}
        return await self.client.generate(prompt, **asked).collect()

    async def all_at_once(
        self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """The answers to prompts that arrive at the same instant."""
        return await asyncio.gather(*(self.complete(prompt, **options) for prompt in prompts))

    async def describe(self) -> cache_pb2.WorkerDescription:
        """The worker as the manager sees it, with its block map."""
        (worker,) = (await self.client.describe(worker_id=WORKER, first_block=0)).workers
        return worker

    async def until_idle(self) -> None:
        """Until nothing is held or reserved."""

        async def idle() -> bool:
            return all(counts.held == counts.reserved == 0 for counts in (await self.describe()).counts)

        await eventually(idle, "all blocks come back")

    async def until_arrived(self, num_requests: int) -> None:
        """Until the worker has that many requests."""
        await until(lambda: sum(1 for _ in self.worker.engine.scheduler) >= num_requests)


@asynccontextmanager
async def in_process_cluster(model: Path, folder: Path, **settings: Any) -> AsyncIterator[InProcessCluster]:
    """Serve the model in float32 with `settings` of the worker; every KV slot holds NaN at first. `folder` is for state
    and caches. In the end everything has come back and every law holds."""
    async with running(ManagerSettings(port=0, state_dir=folder / "state", lease_seconds=60)) as manager:
        address = f"127.0.0.1:{manager.port}"
        own = {
            "manager": address,
            "worker_id": WORKER,
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "cache_dir": folder / "cache",
            "state_dir": folder / "state-worker",
            "block_size": 4,
            "num_blocks": 129,
        }
        worker = await WorkerServer.load(WorkerSettings(**{**own, **settings}))
        worker.runner.kv_cache.fill(float("nan"))
        async with worker, Client(address) as client:
            cluster = InProcessCluster(manager, worker, client)
            await until(worker.engine.cache.is_ready)
            yield cluster
            await cluster.until_idle()
