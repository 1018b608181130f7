"""A cluster of the workers a and b, which tests do harm to and hand on whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.cluster import MANAGER, Cluster
from tests.cluster.models import make_endless_model
from tests.tiny_models import TinyModel

WORKERS = ("a", "b")


@dataclass(frozen=True)
class TwoWorkers:
    """The cluster; both workers serve one model."""

    cluster: Cluster

    async def both_live(self) -> None:
        """Both are registered, all blocks have come back, and every law holds."""
        await self.cluster.until_registered(*WORKERS)
        await self.cluster.until_clean()

    async def _repair(self) -> None:
        """Let a test that has failed in the middle not take others with it."""
        if self.cluster.processes[MANAGER].status is not None:
            await self.cluster.start_manager()
        for name in WORKERS:
            self.cluster.resume(name)
            if self.cluster.processes[name].status is not None:
                self.cluster.start_worker(name)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Both live before a test and behind it, whatever it has done."""
        await self.both_live()
        try:
            yield
        finally:
            await self._repair()
            await self.both_live()


@asynccontextmanager
async def two_workers(
    folder: Path, *, lease_seconds: float, tokenizer: bool = False, **settings: Any
) -> AsyncIterator[tuple[Cluster, TinyModel]]:
    """Start both, with blocks of 4 tokens and these settings, over a model whose texts never end."""
    model = make_endless_model(folder / "endless", tokenizer=tokenizer)
    async with Cluster(folder, lease_seconds=lease_seconds, keep_alive_seconds=0.2) as cluster:
        await cluster.start({name: {"model": model.path, "block_size": 4, **settings} for name in WORKERS})
        yield cluster, model
