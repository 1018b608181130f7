"""Streams decode while the manager is away for seconds: no decode step may wait for it."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvpool.client import Client
from tests.cluster.cluster import MANAGER, Cluster
from tests.cluster.process import Process
from tests.live.workload import Model, make_requests
from tests.load.judge import Delivered

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
class _Watched(Delivered):
    """What one stream delivered, and when each token came."""

    times: list[float] = field(default_factory=list)

    async def watch(self, client: Client, prompt: tuple[int, ...]) -> None:
        async for chunk in client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True):
            self.add(chunk)
            self.times += [time.monotonic()] * len(chunk.token_ids)


async def measure_outages(
    model: Model, folder: Path, *, num_workers: int, num_streams: int, seconds: float, reserve_seconds: float, seed: int
) -> list[Outage]:
    """The same streams without an outage, while the manager is frozen, and while it is dead, each in a cluster of its own."""
    prompts = [request.prompt for request in make_requests(model, num_streams, random.Random(seed))]
    worker = {"model": model.path, "block_size": model.block_size, "num_blocks": 60_000, "grace_seconds": 0}
    workers = {f"worker-{number}": worker | {"reserve_seconds": reserve_seconds} for number in range(num_workers)}
    outages: list[Outage] = []
    undisturbed: list[_Watched] = []
    for away in Away:
        streams = [_Watched() for _ in prompts]
        undisturbed = undisturbed or streams
        place = folder / away
        place.mkdir()
        async with Cluster(place) as cluster:
            await cluster.start(workers)
            async with cluster.client() as client:
                tasks = [
                    asyncio.create_task(stream.watch(client, prompt))
                    for stream, prompt in zip(streams, prompts, strict=True)
                ]
                await asyncio.sleep(WARM_UP_SECONDS)
                reserves = {
                    worker.worker_id: sum(counts.reserved for counts in worker.counts) * model.block_size
                    for worker in await cluster.describe()
                }
                began = time.monotonic()
                await _go_away(cluster, away, seconds)
                ended = time.monotonic()
                # Whatever was held back by the outage would come now.
                await asyncio.sleep(1.0)
                for task in tasks:
                    assert not task.done(), task
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            num_waits = sum([await _num_waits(cluster.processes[name]) for name in workers])
        outages.append(_summary(away, (began, ended), streams, undisturbed, reserves, num_waits))
    return outages


async def _go_away(cluster: Cluster, away: Away, seconds: float) -> None:
    if away is Away.FROZEN:
        cluster.suspend(MANAGER)
    elif away is Away.KILLED:
        cluster.kill(MANAGER)
    await asyncio.sleep(seconds)
    if away is Away.FROZEN:
        cluster.resume(MANAGER)
    elif away is Away.KILLED:
        await cluster.start_manager()


async def _num_waits(process: Process) -> int:
    """Ends the worker, which then logs it."""
    process.send(signal.SIGTERM)
    assert await process.ended() == 0, process.log[-2000:]
    (count,) = re.findall(r"decodes_that_waited_for_a_call=(\d+)", process.log)
    return int(count)


def _summary(
    away: Away,
    span: tuple[float, float],
    streams: list[_Watched],
    undisturbed: list[_Watched],
    reserves: dict[str, int],
    num_waits: int,
) -> Outage:
    began, ended = span
    seconds = ended - began
    gaps = [
        later - earlier
        for stream in streams
        for earlier, later in itertools.pairwise(stream.times)
        if began <= later and earlier <= ended
    ]
    received = Counter(stream.workers[-1] for stream in streams for at in stream.times if began <= at <= ended)
    return Outage(
        away=away,
        seconds=seconds,
        num_tokens=received.total(),
        gap_median=statistics.median(gaps),
        gap_most=max(gaps),
        reserve_least=min(reserve * seconds / max(received[name], 1) for name, reserve in reserves.items()),
        num_waits=num_waits,
        num_differences=sum(
            bool(stream.misplaced)
            or any(ours != theirs for ours, theirs in zip(stream.tokens, other.tokens, strict=False))
            for stream, other in zip(streams, undisturbed, strict=True)
        ),
    )
