"""An engine whose steps and calls take turns: what meets in the pool is decided by sizes, not by the speed of anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvpool.worker_service.engine.engine import Engine
from kvpool.worker_service.step import PartResult, Step


@asynccontextmanager
async def in_lockstep(engine: Engine, num_requests: int) -> AsyncIterator[None]:
    """Inside, the first step begins when that many requests have arrived, and no step while a call to the manager is due or
    unanswered."""
    lockstep = _Lockstep(engine, num_requests)
    try:
        yield
    finally:
        await lockstep.end()


class _Lockstep:
    """A StepRunner that waits in the model's thread until a step may begin."""

    def __init__(self, engine: Engine, num_requests: int) -> None:
        self._engine = engine
        self._runner = engine._runner
        self._loop = asyncio.get_running_loop()
        self._num_to_arrive = num_requests
        self._num_waiting = 0
        self._is_over = False
        engine._runner = self

    def execute(self, step: Step) -> list[PartResult]:
        """In the model's thread."""
        asyncio.run_coroutine_threadsafe(self._until_may_begin(), self._loop).result()
        return self._runner.execute(step)

    async def end(self) -> None:
        """Let steps run as they come again."""
        self._engine._runner = self._runner
        self._is_over = True
        while self._num_waiting:
            await asyncio.sleep(0.001)

    async def _until_may_begin(self) -> None:
        self._num_waiting += 1
        try:
            while not self._is_over and not (self._all_have_arrived() and self._link_rests()):
                await asyncio.sleep(0.001)
        finally:
            self._num_waiting -= 1

    def _all_have_arrived(self) -> bool:
        if sum(1 for _ in self._engine.scheduler) >= self._num_to_arrive:
            self._num_to_arrive = 0
        return not self._num_to_arrive

    def _link_rests(self) -> bool:
        link = self._engine.cache.state.link
        return link is not None and link.in_flight is None and not self._engine.changed_for_link.is_set()
