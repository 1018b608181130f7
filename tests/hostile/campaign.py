"""All attacks one after the other, twice, on one cluster, beside a good client."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from tests.hostile import connections, over_http
from tests.hostile.arena import Arena
from tests.hostile.at_gateway import GATEWAY_SINGLES
from tests.hostile.connections import SlowReaders
from tests.hostile.fuzz import Fuzzer
from tests.hostile.judge import Judge, Part
from tests.hostile.single import SINGLES, Outcome
from tests.telling import Tell

GROWTH_BYTES: Final = 32 << 20
"""What the second round may add to a process."""
QUIET_SECONDS: Final = 5.0
"""Before memory is read, for what is on its way out."""
PATIENCE: Final = 15.0
"""Seconds until the cluster must be as before, where no lease has to end first."""
NUM_LEASES: Final = 4
"""The same in leases, where one has: until the attacker's ends, one more, the worker's next try, and one for a busy machine."""
READER_SECONDS: Final = 1
READER_SLACK: Final = 30.0
ATTACKER_NICE: Final = 10
"""A real attacker has a machine of its own; this one must not take the cores from those whom it attacks."""
CALM: Final = "calm"
"""The part without an attack, with which the others compare."""
AS_CALM: Final = frozenset(single.name for single in (*SINGLES, *GATEWAY_SINGLES) if single.is_as_calm)
NUM_FILES: Final = 8192
"""Open ones that the idle connections need, here and in the services, which inherit the limit."""


@dataclass(frozen=True)
class Settings:
    """How much of everything."""

    num_messages: int = 20_000
    num_malformed: int = 5_000
    num_idle: int = 2_000
    num_reset_connections: int = 40
    num_resets_each: int = 500
    num_slow_readers: int = 60
    num_malformed_http: int = 3_000
    num_idle_http: int = 1_000
    num_stopped_readers: int = 3
    num_viewers: int = 100
    calm_seconds: float = 10.0
    """Without any attack, at the beginning of a round: what the other parts compare with."""
    num_rounds: int = 2
    only: tuple[str, ...] = ()
    """Parts whose name contains one of these; all if empty."""
    limit_seconds: float = 2.0
    lease_seconds: float = 6.0
    seed: int = 1


@dataclass
class Result:
    """What came of it."""

    settings: Settings
    rounds: list[list[Part]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    """Bytes of each process after each round."""
    most_lines: dict[str, int] = field(default_factory=dict)
    """Logged within one minute, by process."""
    num_rebuilt: int = 0
    violations: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


Attack = Callable[[Outcome], Awaitable[None]]


async def campaign(settings: Settings, folder: Path, progress: Tell) -> Result:
    """Do it; raises only if the cluster cannot be started."""
    allow_files()
    result = Result(settings)
    arena = Arena(folder, lease_seconds=settings.lease_seconds, worker_settings=worker_settings())
    async with Judge(arena, settings.limit_seconds) as judge:
        # Once the others run: they would inherit it.
        os.nice(ATTACKER_NICE)
        for number in range(1, settings.num_rounds + 1):
            parts: list[Part] = []
            result.rounds.append(parts)
            for name, attack, patience in _parts(arena, settings, number, progress):
                if settings.only and not any(word in name for word in settings.only):
                    continue
                progress(f"round {number}, {name}", 0, 1)
                part = await judge.part(name, attack, patience, is_calm=name == CALM, is_as_calm=name in AS_CALM)
                parts.append(part)
                result.violations += [f"round {number}, {name}: {problem}" for problem in part.problems]
            await asyncio.sleep(QUIET_SECONDS)
            result.memory.append({name: process.resident_bytes for name, process in arena.cluster.processes.items()})
        result.num_rebuilt = judge.num_rebuilt
        result.most_lines = judge.logs.most_in_a_minute
        result.violations += judge.talkative()
    _judge_memory(result)
    return result


def worker_settings() -> dict[str, Any]:
    """Readers that do not read are ended sooner than by default, so that the wait is short."""
    return {"reader_seconds": READER_SECONDS}


def _judge_memory(result: Result) -> None:
    """Of a cluster that was replaced there is nothing to compare, and enough to complain about."""
    if len(result.memory) < 2 or result.num_rebuilt:
        return
    for name, before in result.memory[0].items():
        grown = result.memory[-1][name] - before
        if grown > GROWTH_BYTES:
            result.violations.append(
                f"the last round added {grown >> 20} MiB to {name}, more than {GROWTH_BYTES >> 20}"
            )


def allow_files() -> None:
    """Raise the limit of open files to what the idle connections need, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < NUM_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(NUM_FILES, hard), hard))


def _parts(arena: Arena, settings: Settings, number: int, progress: Tell) -> Iterator[tuple[str, Attack, float]]:
    """Name, attack and patience of each part of a round."""
    seed = settings.seed + number

    def counted(name: str, count: int) -> Callable[[int], None]:
        return lambda done: progress(f"round {number}, {name}", done, count)

    async def calm(outcome: Outcome) -> None:
        await asyncio.sleep(settings.calm_seconds)

    async def malformed(outcome: Outcome) -> None:
        count = settings.num_malformed
        outcome.said += _said(await connections.malformed(arena, seed, count, counted("malformed", count)))

    async def resets(outcome: Outcome) -> None:
        count = settings.num_reset_connections
        found = await connections.rapid_reset(arena, count, settings.num_resets_each, counted("rapid reset", count))
        outcome.said += _said(found)

    yield CALM, calm, PATIENCE
    counter = counted("mutated messages", settings.num_messages)
    yield "mutated messages", partial(fuzz, arena, seed, settings.num_messages, on_sent=counter), PATIENCE
    yield "malformed connections", malformed, PATIENCE
    yield "idle connections", partial(hold_idle, arena, settings.num_idle), PATIENCE
    yield "rapid reset", resets, PATIENCE
    seconds = READER_SECONDS + READER_SLACK
    yield "slow readers", partial(hold_unread, arena, settings.num_slow_readers, seconds), PATIENCE
    counter = counted("HTTP: malformed requests", settings.num_malformed_http)
    yield (
        "HTTP: malformed requests",
        partial(malformed_http, arena, seed, settings.num_malformed_http, counter),
        PATIENCE,
    )
    yield "HTTP: idle connections", partial(hold_idle_http, arena, settings.num_idle_http), PATIENCE
    yield "HTTP: readers that stop", partial(hold_unread_http, arena, settings.num_stopped_readers, seconds), PATIENCE
    yield "HTTP: viewers that stop", partial(hold_viewers, arena, settings.num_viewers), PATIENCE
    for single in (*SINGLES, *GATEWAY_SINGLES):
        patience = NUM_LEASES * settings.lease_seconds if single.costs_a_session else PATIENCE
        yield single.name, partial(single.run, arena), patience


def _said(counter: Counter[str]) -> list[str]:
    return [f"{count:,} {what}" for what, count in counter.most_common()]


async def fuzz(
    arena: Arena, seed: int, count: int, outcome: Outcome, on_sent: Callable[[int], None] = lambda sent: None
) -> None:
    """Mutated messages; a status that is none of the table's is a problem."""
    fuzzer = Fuzzer(arena, seed, count, on_sent)
    await fuzzer.run()
    outcome.said += _said(fuzzer.outcomes)
    if fuzzer.defects:
        worst = "; ".join(f"{what} ({times} times)" for what, times in fuzzer.defects.most_common(2))
        outcome.problems.append(f"{fuzzer.defects.total()} messages were answered no status of the table, e.g. {worst}")


async def hold_idle(arena: Arena, count: int, outcome: Outcome) -> None:
    """Idle connections; while they are there, the cluster must take new ones and serve."""
    async with connections.idle(arena, count) as found:
        outcome.said += _said(found)
        if refused := count - found["open"]:
            outcome.problems.append(f"{refused} of {count} idle connections were not accepted")
        outcome.problems += [f"beside {count} idle connections: {one}" for one in await arena.problems(PATIENCE)]


async def hold_unread(arena: Arena, count: int, seconds: float, outcome: Outcome) -> None:
    """Streams that nobody reads: the worker ends them within the time, frees their blocks, and says so to who reads at last."""
    async with SlowReaders(arena, count) as readers:
        if left := await readers.until_freed(seconds):
            outcome.problems.append(f"{left} of {count} streams that are not read hold blocks after {seconds:g} s")
        statuses = await readers.statuses(seconds)
    outcome.said += _said(statuses)
    exhausted = statuses[f"status {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}"]
    if exhausted < count:
        outcome.problems.append(
            f"{count - exhausted} of {count} streams that were not read did not end with RESOURCE_EXHAUSTED"
        )


async def malformed_http(arena: Arena, seed: int, count: int, on_done: Callable[[int], None], outcome: Outcome) -> None:
    """Requests that are none, or not allowed, or wrong in what they ask for: no answer says that the gateway failed."""
    statuses = await over_http.malformed(arena.gateway_url, seed, count, on_done)
    outcome.said += _said(statuses)
    if failed := sum(times for said, times in statuses.items() if said.startswith("5") and said not in ("503", "504")):
        outcome.problems.append(f"{failed} requests were answered that the gateway has failed")


async def hold_idle_http(arena: Arena, count: int, outcome: Outcome) -> None:
    """Connections without a request, and with a part of one; meanwhile the gateway takes new ones and answers."""
    async with over_http.idle(arena.gateway_url, count) as num_open:
        outcome.said.append(f"{num_open:,} open")
        if num_open < count:
            outcome.problems.append(f"{count - num_open} of {count} idle connections were not accepted")
        outcome.problems += [f"next to {count} idle connections: {one}" for one in await arena.problems(PATIENCE)]


async def hold_unread_http(arena: Arena, count: int, seconds: float, outcome: Outcome) -> None:
    """Long answers that nobody reads: the gateway closes their connections within the time."""
    total = await over_http.num_cut_off(arena.gateway_url) + count
    async with over_http.unread_answers(arena.gateway_url, count):
        if left := await over_http.until_cut_off(arena.gateway_url, total, seconds):
            outcome.problems.append(
                f"{left} of {count} readers that stopped still have a connection after {seconds:g} s"
            )


async def hold_viewers(arena: Arena, count: int, outcome: Outcome) -> None:
    """Event streams of the page that nobody reads; meanwhile the gateway answers."""
    async with over_http.unread_viewers(arena.gateway_url, count):
        outcome.problems += [f"next to {count} viewers: {one}" for one in await arena.problems(PATIENCE)]
