"""The whole proof: a cluster, load, faults, and the judgement of every stream."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.cluster.cluster import Cluster
from tests.live.difference import Doubt, Judge
from tests.live.faults import Fault, Faults, Recovery, complaints
from tests.live.load import Ended, Load
from tests.live.outage import Away, Outage, measure_outages
from tests.live.workload import Model, Workload, make_requests

MANAGER_KILLED: Final = "manager killed"
WORKER_HARMED: Final = "worker harmed"
MEDIAN_SECONDS: Final = 1.5
WORST_SECONDS: Final = 4.0
"""From the kill of a manager to the first new Allocate answered, at most."""


@dataclass(frozen=True)
class Settings:
    """What is to be done."""

    model: str
    kills: int
    worker_faults: int
    outage_seconds: float
    """0: no outage."""
    reserve_seconds: float
    """In the outage."""
    workers: int
    streams: int
    requests: int
    seed: int
    lease_seconds: float = 6.0
    keep_alive_seconds: float = 1.0
    num_new: int | None = None
    """Tokens of each answer; None: at random, as the model has them."""
    pause_seconds: float = 1.5
    """Between two faults at most."""
    minutes: float | None = None
    """No fault begins later than that; None: all are done."""


@dataclass
class Phase:
    """Faults of one kind under load."""

    name: str
    faults: int = 0
    streams: int = 0
    tokens: int = 0
    hit: int = 0
    """Streams in the middle of which a fault fell, each as often as one did; with workers, of the one that was harmed."""
    moved: int = 0
    """Streams that went on at another worker."""


@dataclass
class Result:
    """What came of it."""

    settings: Settings
    phases: list[Phase] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    worker_faults: dict[str, int] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    """Every token of an undisturbed answer that is not transformers' own choice, where either is right."""
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def judge_times(self) -> None:
        """Whether new requests were served as soon as they must be."""
        grants = [recovery.first_grant for recovery in self.recoveries]
        if grants and statistics.median(grants) >= MEDIAN_SECONDS:
            self.violations.append(
                f"median recovery {statistics.median(grants):.2f} s, needed under {MEDIAN_SECONDS} s"
            )
        if grants and max(grants) >= WORST_SECONDS:
            self.violations.append(f"worst recovery {max(grants):.2f} s, needed under {WORST_SECONDS} s")

    def judge_outages(self) -> None:
        """No decode step may have waited, and every text is undisturbed."""
        for outage in self.outages:
            if outage.num_waits:
                self.violations.append(
                    f"manager {outage.away} {outage.seconds:.0f} s: {outage.num_waits} decodes waited"
                )
            if outage.num_differences:
                self.violations.append(f"manager {outage.away}: {outage.num_differences} streams differ")


Progress = Callable[[str, int, int], None]
"""What is going on, how much of it is done, of how much."""


async def prove(settings: Settings, folder: Path, progress: Progress) -> Result:
    """Do all of it; raises only if a cluster cannot be made to work at all. How long recovery took is not judged here."""
    result = Result(settings)
    model = Model.make(settings.model, folder)
    await _faults_under_load(settings, model, folder, result, progress)
    if settings.outage_seconds:
        progress("the manager is away", 0, len(Away))
        result.outages = await measure_outages(
            model,
            folder,
            num_workers=settings.workers,
            num_streams=2 * settings.workers,
            seconds=settings.outage_seconds,
            reserve_seconds=settings.reserve_seconds,
            seed=settings.seed,
        )
        result.judge_outages()
        progress("the manager is away", len(Away), len(Away))
    return result


async def _faults_under_load(
    settings: Settings, model: Model, folder: Path, result: Result, progress: Progress
) -> None:
    began = time.monotonic()
    draw = random.Random(settings.seed)
    workload = Workload(make_requests(model, settings.requests, draw, settings.num_new))
    names = [f"worker-{number}" for number in range(settings.workers)]
    loads: list[list[Ended]] = []
    place = folder / "faults"
    place.mkdir()
    async with Cluster(
        place,
        lease_seconds=settings.lease_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
    ) as cluster:
        await cluster.start_manager()
        for name in names:
            cluster.start_worker(
                name, model=model.path, block_size=model.block_size, num_blocks=16_385, grace_seconds=2.0
            )
        await cluster.until_registered(*names)
        async with cluster.client() as client:
            await workload.ask_undisturbed(
                client, lambda: progress("undisturbed answers", len(workload.answers), settings.requests)
            )
            faults = Faults(cluster, client, names, settings.lease_seconds, draw, settings.pause_seconds)

            async def under_load(name: str, deeds: Sequence[Callable[[Load], Awaitable[str]]]) -> None:
                load = Load(client, workload, settings.streams, draw)
                phase = Phase(name)
                result.phases.append(phase)
                loads.append(load.ended)
                try:
                    async with load:
                        for deed in deeds:
                            if settings.minutes is not None and time.monotonic() - began > 60 * settings.minutes:
                                why = f"{phase.faults} of {len(deeds)} faults within {settings.minutes:g} minutes"
                                result.violations.append(f"{name}: only {why}")
                                break
                            what = await deed(load)
                            phase.faults += 1
                            progress(f"{what}; {len(load.ended)} streams have ended", phase.faults, len(deeds))
                finally:
                    phase.streams, phase.tokens = len(load.ended), load.num_tokens
                    phase.hit, faults.num_hit = faults.num_hit, 0
                    phase.moved = sum(ended.has_moved for ended in load.ended)

            try:
                kills = [
                    partial(faults.kill_manager, request=draw.choice(workload.requests)) for _ in range(settings.kills)
                ]
                await under_load(MANAGER_KILLED, kills)
                harms = [partial(faults.harm_worker, fault=fault) for fault in _in_turn(settings.worker_faults, draw)]
                await under_load(WORKER_HARMED, harms)
                await cluster.until_clean()
            except (AssertionError, TimeoutError) as error:
                # What was seen until then is worth judging all the same.
                result.violations.append(f"broke off: {type(error).__name__}: {error}")
        result.violations += faults.violations + complaints(cluster)
    result.recoveries = faults.recoveries
    result.worker_faults = {fault: faults.done[fault] for fault in Fault}
    judge_streams(result, Judge.of(model.path), workload, loads)


def _in_turn(count: int, draw: random.Random) -> list[Fault]:
    """So many faults, each kind as often as the others, in random order."""
    kinds = list(Fault)
    faults = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(faults)
    return faults


def judge_streams(result: Result, judge: Judge, workload: Workload, loads: list[list[Ended]]) -> None:
    """Every stream tells the undisturbed answer to the last bit, since batches are invariant; that answer is the model's own."""
    for request, answer in zip(workload.requests, workload.answers, strict=True):
        _weigh(result, judge.doubts(request, answer.token_ids))
    for phase, ended_streams in zip(result.phases, loads, strict=True):
        for ended in ended_streams:
            if ended.problem is not None:
                result.violations.append(f"{phase.name}: request {ended.request} on {ended.workers}: {ended.problem}")
            elif not ended.is_equal:
                where = _first_difference(ended.token_ids, workload.answers[ended.request].token_ids)
                result.violations.append(f"{phase.name}: request {ended.request} on {ended.workers}: {where}")
        if phase.name == MANAGER_KILLED:
            # Their workers lived: whoever had begun had no reason to go elsewhere.
            for ended in ended_streams:
                if ended.has_moved:
                    result.violations.append(f"{phase.name}: request {ended.request} moved over {ended.workers}")


def _first_difference(tokens: Sequence[int], right: Sequence[int]) -> str:
    for index, pair in enumerate(zip(tokens, right, strict=False)):
        if pair[0] != pair[1]:
            return f"token {index} is {pair[0]}, undisturbed {pair[1]}"
    return f"{len(tokens)} tokens, undisturbed {len(right)}"


def _weigh(result: Result, doubts: list[Doubt]) -> None:
    for doubt in doubts:
        if doubt.is_tie:
            result.doubts.append(f"undisturbed: {doubt}")
        else:
            # What follows a wrong token is wrong in its own way: the first one tells.
            result.violations.append(f"undisturbed: {doubt}")
            return
