"""A cluster under a load that is always more than it has room for, for as long as it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.cluster.cluster import Cluster
from tests.cluster.models import make_endless_model
from tests.load.judge import bad_log_lines
from tests.load.load import Load, Totals
from tests.model.plain_loop import PlainLoop
from tests.soak.watch import Growth, Watch, growth
from tests.soak.workload import make_call, make_workload
from tests.telling import Tell

FULL: Final = 0.99
"""Share of the fullest pool that must be held at the median."""
JUDGED_SECONDS: Final = 60.0
"""A shorter soak does not show how full pools are, nor what grows."""


LARGE: Final = {"num_blocks": 1025, "max_num_seqs": 256}
"""A worker's pool that is always full: what the next in line needs is little beside it."""
SMALL: Final = {"num_blocks": 129, "max_num_seqs": 24}
"""Two long sequences and it is full, so they are preempted often; but what is left is often too little for the next."""


@dataclass(frozen=True)
class Settings:
    """How long, and how much at once."""

    seconds: float
    num_streams: int = 0
    """It goes on until so many have ended, also beyond `seconds`."""
    pools: tuple[Mapping[str, int], ...] = (LARGE, SMALL)
    """Of one worker each."""
    num_readers: int = 200
    num_requests: int = 150
    num_tokens: int = 96
    seconds_between_looks: float = 5.0
    seed: int = 1


@dataclass
class Result:
    settings: Settings
    totals: Totals = field(default_factory=Totals)
    seconds: float = 0.0
    usage: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By worker: share of its pool that sequences and reserve held, at the median and at least."""
    num_checks: int = 0
    growth: list[Growth] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


async def soak(settings: Settings, folder: Path, progress: Tell) -> Result:
    """Do it; raises only if the cluster cannot be started."""
    draw = random.Random(settings.seed)
    model = make_endless_model(folder / "model", tokenizer=True)
    workload = make_workload(PlainLoop(model.path), settings.num_requests, settings.num_tokens, draw, progress)
    result = Result(settings)
    pools = {f"worker-{number}": pool for number, pool in enumerate(settings.pools)}
    async with Cluster(folder) as cluster:
        worker = {"model": model.path, "block_size": 4, "max_num_batched_tokens": 512, "scheduling_policy": "priority"}
        await cluster.start({name: worker | dict(pool) for name, pool in pools.items()})
        watch = Watch(cluster, settings.seconds_between_looks)
        async with cluster.client() as client:
            load = Load(client, workload, settings.num_readers, draw, make_call)
            try:
                async with load:
                    await _run(settings, load, watch, result, progress)
                await cluster.until_clean()
            except (AssertionError, TimeoutError) as error:
                result.violations.append(f"at the end: {type(error).__name__}: {error}")
        result.violations += load.violations + watch.violations + bad_log_lines(cluster)
    result.totals = load.totals
    _judge(result, watch)
    return result


async def _run(settings: Settings, load: Load, watch: Watch, result: Result, progress: Tell) -> None:
    """Watch the load until its time is over, or something is wrong."""
    began = time.monotonic()
    await asyncio.sleep(min(2.0, settings.seconds / 4))  # until the pools are full
    watching = asyncio.create_task(watch.run())
    while True:
        passed, ended = time.monotonic() - began, load.totals.num_streams
        progress(f"{ended:,} streams", min(passed, settings.seconds), settings.seconds)
        totals = load.totals
        # On a machine that is slow for a moment the pools come into need later, but not for ever.
        was_in_need = (totals.num_preemptions and totals.num_cached_tokens) or passed >= 30 * settings.seconds
        is_over = passed >= settings.seconds and ended >= settings.num_streams and was_in_need
        if is_over or load.violations or watching.done():
            break
        await asyncio.sleep(min(1.0, max(0.1, settings.seconds - passed)))
    watching.cancel()
    seen = await asyncio.gather(watching, return_exceptions=True)
    result.violations += [f"could not look: {why!r}" for why in seen if isinstance(why, Exception)]
    result.seconds = time.monotonic() - began


def _judge(result: Result, watch: Watch) -> None:
    result.num_checks = watch.num_checks
    if not result.totals.num_preemptions or not result.totals.num_cached_tokens:
        result.violations.append("no preemption, or no hit: the pools were not in need")
    result.usage = {name: (statistics.median(shares), min(shares)) for name, shares in watch.usage.items()}
    if result.settings.seconds < JUDGED_SECONDS:
        return
    fullest = max((median for median, _ in result.usage.values()), default=0.0)
    if fullest < FULL:
        result.violations.append(f"the fullest pool was {fullest:.1%} full at the median, not {FULL:.0%}")
    for name, holdings in watch.holdings.items():
        if len(holdings) < 8:
            result.violations.append(f"{name} was looked at {len(holdings)} times only")
            continue
        result.growth.append(growth(name, holdings))
        result.violations += result.growth[-1].problems
