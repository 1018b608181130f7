"""A cluster of the workers a and b, which tests do harm to and hand on whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.cluster.cluster import MANAGER, Cluster
from tests.cluster.models import make_endless_model

WORKERS = ("a", "b")


class TwoWorkers(Cluster):
    """Both workers serve one model, whose texts never end."""

    def __init__(self, folder: Path, *, lease_seconds: float, tokenizer: bool = False) -> None:
        super().__init__(folder, lease_seconds=lease_seconds, keep_alive_seconds=0.2)
        self.model = make_endless_model(folder / "endless", tokenizer=tokenizer)

    async def start_both(self, **settings: Any) -> None:
        """Start the manager and both workers, with blocks of 4 tokens and these settings."""
        settings = {"model": self.model.path, "block_size": 4, **settings}
        await self.start(dict.fromkeys(WORKERS, settings))

    async def both_live(self) -> None:
        """Both are registered, all blocks have come back, and every law holds."""
        await self.until_registered(*WORKERS)
        await self.until_clean()

    async def _repair(self) -> None:
        """Let a test that has failed in the middle not take others with it."""
        if self.processes[MANAGER].status is not None:
            await self.start_manager()
        for name in WORKERS:
            self.resume(name)
            if self.processes[name].status is not None:
                self.start_worker(name)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Both live before a test and behind it, whatever it has done."""
        await self.both_live()
        try:
            yield
        finally:
            await self._repair()
            await self.both_live()
