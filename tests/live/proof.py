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
from tests.live.faults import Fault, Faults, Recovery
from tests.live.outage import Away, Outage, measure_outages
from tests.live.workload import Model, ask_undisturbed, make_call, make_requests
from tests.load.judge import bad_log_lines
from tests.load.load import Load, Totals
from tests.load.workload import Reference
from tests.model.plain_loop import PlainLoop
from tests.telling import Tell

MANAGER_KILLED: Final = "manager killed"
WORKER_HARMED: Final = "worker harmed"
MEDIAN_SECONDS: Final = 1.5
WORST_SECONDS: Final = 4.0
"""From the kill of a manager to the first new Allocate answered, at most."""


@dataclass(frozen=True)
class Settings:
    model: str
    kills: int
    worker_faults: int
    outage_seconds: float
    """0: no outage."""
    reserve_seconds: float
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
    fault_kinds: tuple[Fault, ...] = tuple(Fault)
    """Of workers, each as often as the others."""
    step_seconds: float | None = None
    """What each step takes longer, as on a slow device; None: as fast as it is."""
    minutes: float | None = None
    """No fault begins later than that; None: all are done."""


@dataclass
class Phase:
    """Faults of one kind under load."""

    name: str
    faults: int = 0
    hit: int = 0
    """Streams in the middle of which a fault fell, each as often as one did; with workers, of the one that was harmed."""
    streams: Totals = field(default_factory=Totals)


@dataclass
class Result:
    settings: Settings
    phases: list[Phase] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    worker_faults: dict[str, int] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    """Every token of an undisturbed answer that is not transformers' own choice, where either is right."""
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def judge_times(self) -> None:
        """Whether new requests were served as soon as they must be."""
        grants = [recovery.first_grant for recovery in self.recoveries]
        for what, of, limit in (("median", statistics.median, MEDIAN_SECONDS), ("worst", max, WORST_SECONDS)):
            if grants and of(grants) >= limit:
                self.violations.append(f"{what} recovery {of(grants):.2f} s, needed under {limit} s")

    def judge_outages(self) -> None:
        """No decode step may have waited, and every text is undisturbed."""
        for outage in self.outages:
            where = f"manager {outage.away} {outage.seconds:.0f} s"
            if outage.num_waits:
                self.violations.append(f"{where}: {outage.num_waits} decodes waited")
            if outage.num_differences:
                self.violations.append(f"{where}: {outage.num_differences} streams differ")


async def prove(settings: Settings, folder: Path, progress: Tell) -> Result:
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


async def _faults_under_load(settings: Settings, model: Model, folder: Path, result: Result, progress: Tell) -> None:
    began = time.monotonic()
    draw = random.Random(settings.seed)
    requests = make_requests(model, settings.requests, draw, settings.num_new)
    names = [f"worker-{number}" for number in range(settings.workers)]
    place = folder / "faults"
    place.mkdir()
    async with Cluster(
        place, lease_seconds=settings.lease_seconds, keep_alive_seconds=settings.keep_alive_seconds
    ) as cluster:
        worker = {
            "model": model.path,
            "block_size": model.block_size,
            "num_blocks": 16_385,
            "grace_seconds": settings.lease_seconds / 3,
            **({} if settings.step_seconds is None else {"step_seconds": settings.step_seconds}),
        }
        await cluster.start(dict.fromkeys(names, worker))
        async with cluster.client(liveness_interval=settings.lease_seconds / 3) as client:
            workload = await ask_undisturbed(
                client, requests, lambda done: progress("undisturbed answers", done, len(requests))
            )
            faults = Faults(cluster, client, names, settings.lease_seconds, draw, settings.pause_seconds)

            async def under_load(name: str, deeds: Sequence[Callable[[Load], Awaitable[str]]]) -> None:
                # A worker lives on while the manager dies: what runs on it has no reason to continue on another one.
                may_move = name != MANAGER_KILLED
                load = Load(client, workload, settings.streams, draw, make_call, may_move=may_move)
                phase = Phase(name, streams=load.totals)
                result.phases.append(phase)
                try:
                    async with load:
                        for deed in deeds:
                            if settings.minutes is not None and time.monotonic() - began > 60 * settings.minutes:
                                why = f"{phase.faults} of {len(deeds)} faults within {settings.minutes:g} minutes"
                                result.violations.append(f"{name}: only {why}")
                                break
                            what = await deed(load)
                            phase.faults += 1
                            progress(f"{what}; {load.totals.num_streams} streams have ended", phase.faults, len(deeds))
                finally:
                    phase.hit, faults.num_hit = faults.num_hit, 0
                    result.violations += [f"{name}: {violation}" for violation in load.violations]

            try:
                kills = [partial(faults.kill_manager, request=draw.choice(requests)) for _ in range(settings.kills)]
                await under_load(MANAGER_KILLED, kills)
                harms = [partial(faults.harm_worker, fault=fault) for fault in _in_turn(settings, draw)]
                await under_load(WORKER_HARMED, harms)
                await cluster.until_clean()
            except (AssertionError, TimeoutError) as error:
                # What was seen until then is worth judging all the same.
                result.violations.append(f"broke off: {type(error).__name__}: {error}")
        result.violations += faults.violations + bad_log_lines(cluster)
    result.recoveries = faults.recoveries
    result.worker_faults = {fault: faults.done[fault] for fault in settings.fault_kinds}
    judge_answers(result, PlainLoop(model.path), workload)


def _in_turn(settings: Settings, draw: random.Random) -> list[Fault]:
    """So many faults, each kind as often as the others, in random order."""
    kinds = settings.fault_kinds
    faults = [kinds[number % len(kinds)] for number in range(settings.worker_faults)]
    draw.shuffle(faults)
    return faults


def judge_answers(result: Result, loop: PlainLoop, workload: Sequence[Reference]) -> None:
    """Every undisturbed answer is the model's own; where two tokens are equally right, either. Streams under load must give
    the same answers to the last bit, since batches are invariant."""
    for reference in workload:
        request, tokens = reference.request, reference.token_ids
        for index, is_tie in loop.differences(request.prompt, request.sampling, tokens):
            where = f"undisturbed: request {request.number}, token {index} is {tokens[index]}"
            if not is_tie:
                # The tokens after a wrong one follow from it: the first is enough.
                result.violations.append(where)
                break
            result.ties.append(where)
