"""A log line every ten seconds while a worker is busy: throughput, cache usage, hit rate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from operator import sub
from typing import Final

import structlog

from .engine.engine import Engine

log = structlog.get_logger("kvpool.worker")

INTERVAL_SECONDS: Final = 10.0


class ThroughputLog:
    """Logs the change of the engine's counts."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._last = self._count()

    async def run(self) -> None:
        """Call `log_change` every INTERVAL_SECONDS until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.log_change()

    def log_change(self) -> None:
        """Log the change since the last call; nothing while the worker is idle."""
        before, self._last = self._last, self._count()
        scheduler, cache = self._engine.scheduler, self._engine.cache
        seconds, prefilled, generated, admitted, cached = map(sub, self._last, before)
        if seconds <= 0 or not (prefilled or generated or scheduler.num_running or scheduler.num_waiting):
            return
        # Without a new prompt there is no rate.
        hits = {"hit_rate": round(cached / admitted, 3)} if admitted else {}
        log.info(
            "throughput",
            prompt_tokens_per_s=round(prefilled / seconds, 1),
            generated_tokens_per_s=round(generated / seconds, 1),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_usage=round(cache.usage, 3),
            **hits,
        )

    def _count(self) -> tuple[float, int, int, int, int]:
        """The time, and the tokens prefilled, generated, admitted and cached until then."""
        stats = self._engine.stats
        return (
            self._clock(),
            stats.num_forwarded_tokens - stats.num_decoded_tokens,
            stats.num_generated_tokens,
            stats.num_admitted_tokens,
            stats.num_cached_tokens,
        )
