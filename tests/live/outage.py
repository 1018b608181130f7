"""A manager that is away for seconds while streams decode: no decode step may wait for it."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import statistics
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvpool.client import Client
from tests.cluster.cluster import MANAGER, Cluster
from tests.live.workload import Model, make_requests

NUM_NEW = 60_000
"""So many that no stream ends within the experiment."""
WARM_UP_SECONDS = 3.0
"""Until the reserve knows how fast decoding is."""


class Away(StrEnum):
    """How the manager is away."""

    NOT = "there"
    FROZEN = "frozen"
    KILLED = "killed"


@dataclass(frozen=True)
class Outage:
    """What streams and workers saw of an outage."""

    away: Away
    seconds: float
    num_tokens: int
    """That streams received while it lasted."""
    gap_median: float
    """Between two tokens of a stream, in seconds."""
    gap_most: float
    reserve_least: float
    """How many seconds the reserve that a worker had at the beginning would have lasted at the pace of the outage; of all
    workers the least."""
    num_waits: int
    """decodes_that_waited_for_a_call, over all workers and their whole lives."""
    num_differences: int
    """Streams whose tokens are not those of the run without an outage, as far as both go."""


@dataclass
class _Watched:
    """What one stream delivered, token by token."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    worker: str = ""

    def num_between(self, began: float, ended: float) -> int:
        return sum(began <= at <= ended for at in self.times)


class _Run:
    """One cluster, its streams, and one outage."""

    def __init__(self, model: Model, folder: Path, num_workers: int, reserve_seconds: float) -> None:
        self._cluster = Cluster(folder)
        self._names = [f"worker-{number}" for number in range(num_workers)]
        self._settings: dict[str, Any] = {
            "model": model.path,
            "block_size": model.block_size,
            "num_blocks": 60_000,
            "reserve_seconds": reserve_seconds,
            "grace_seconds": 0,
        }

    async def measure(
        self, prompts: list[tuple[int, ...]], away: Away, seconds: float
    ) -> tuple[Outage, list[_Watched]]:
        async with self._cluster as cluster:
            await cluster.start_manager()
            for name in self._names:
                cluster.start_worker(name, **self._settings)
            await cluster.until_registered(*self._names)
            async with cluster.client() as client:
                streams = [_Watched() for _ in prompts]
                tasks = [
                    asyncio.create_task(_watch(client, prompt, stream))
                    for prompt, stream in zip(prompts, streams, strict=True)
                ]
                await asyncio.sleep(WARM_UP_SECONDS)
                reserves = {
                    worker.worker_id: sum(counts.reserved for counts in worker.counts) * self._settings["block_size"]
                    for worker in await cluster.describe()
                }
                began = time.monotonic()
                await self._go_away(away, seconds)
                ended = time.monotonic()
                # Whatever was held back by the outage would come now.
                await asyncio.sleep(1.0)
                for task in tasks:
                    assert not task.done(), task
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            waits = [await self._waits(name) for name in self._names]
        gaps = [
            later - earlier
            for stream in streams
            for earlier, later in itertools.pairwise(stream.times)
            if began <= later and earlier <= ended
        ]
        return Outage(
            away=away,
            seconds=ended - began,
            num_tokens=sum(stream.num_between(began, ended) for stream in streams),
            gap_median=statistics.median(gaps),
            gap_most=max(gaps),
            reserve_least=min(
                reserve
                / max(sum(s.num_between(began, ended) for s in streams if s.worker == name), 1)
                * (ended - began)
                for name, reserve in reserves.items()
            ),
            num_waits=sum(waits),
            num_differences=0,
        ), streams

    async def _go_away(self, away: Away, seconds: float) -> None:
        if away is Away.FROZEN:
            self._cluster.suspend(MANAGER)
        elif away is Away.KILLED:
            self._cluster.kill(MANAGER)
        await asyncio.sleep(seconds)
        if away is Away.FROZEN:
            self._cluster.resume(MANAGER)
        elif away is Away.KILLED:
            await self._cluster.start_manager()

    async def _waits(self, name: str) -> int:
        process = self._cluster.processes[name]
        process.send(signal.SIGTERM)
        assert await process.ended() == 0, process.log[-2000:]
        (count,) = re.findall(r"decodes_that_waited_for_a_call=(\d+)", process.log)
        return int(count)


async def _watch(client: Client, prompt: tuple[int, ...], stream: _Watched) -> None:
    async for chunk in client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True):
        stream.worker = chunk.worker_id
        stream.tokens += chunk.token_ids
        stream.times += [time.monotonic()] * len(chunk.token_ids)


async def measure_outages(
    model: Model, folder: Path, *, num_workers: int, num_streams: int, seconds: float, reserve_seconds: float, seed: int
) -> list[Outage]:
    """The same streams without an outage, while the manager is frozen, and while it is dead, each in a cluster of its own."""
    prompts = [request.prompt for request in make_requests(model, num_streams, random.Random(seed))]
    outages: list[Outage] = []
    undisturbed: list[_Watched] = []
    for away in Away:
        place = folder / away
        place.mkdir()
        outage, streams = await _Run(model, place, num_workers, reserve_seconds).measure(prompts, away, seconds)
        undisturbed = undisturbed or streams
        num_differences = sum(
            any(ours != theirs for ours, theirs in zip(stream.tokens, other.tokens, strict=False))
            for stream, other in zip(streams, undisturbed, strict=True)
        )
        outages.append(Outage(**{**vars(outage), "num_differences": num_differences}))
    return outages
