"""All attacks one after the other, twice, on one cluster, beside a good client."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from tests.hostile import connections, over_http
from tests.hostile.arena import Arena
from tests.hostile.at_gateway import GATEWAY_SINGLES
from tests.hostile.attack import Attack, Outcome
from tests.hostile.connections import SlowReaders
from tests.hostile.fuzz import Fuzzer
from tests.hostile.judge import CALM, Judge, Part
from tests.hostile.single import SINGLES
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
ATTACKER_NICE: Final = 10
"""A real attacker has a machine of its own; this one must not take the cores from those whom it attacks."""
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
    reader_seconds: float = READER_SECONDS + 30.0
    """Until a reader that does not read must have been ended."""
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
            for attack in attacks(settings, settings.seed + number, partial(_tell, progress, number)):
                if settings.only and not any(word in attack.name for word in settings.only):
                    continue
                _tell(progress, number, attack.name, 1, 0)
                patience = NUM_LEASES * settings.lease_seconds if attack.costs_a_session else PATIENCE
                parts.append(await judge.part(attack, patience))
                result.violations += [f"round {number}, {attack.name}: {problem}" for problem in parts[-1].problems]
            await asyncio.sleep(QUIET_SECONDS)
            result.memory.append({name: process.resident_bytes for name, process in arena.cluster.processes.items()})
        result.num_rebuilt = judge.num_rebuilt
        result.most_lines = judge.logs.most_in_a_minute
        result.violations += judge.talkative()
    _judge_memory(result)
    return result


def _tell(progress: Tell, round_number: int, name: str, count: int, done: int) -> None:
    progress(f"round {round_number}, {name}", done, count)


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


def attacks(
    settings: Settings, seed: int, tell: Callable[[str, int, int], None] = lambda name, count, done: None
) -> list[Attack]:
    """All of one round. `tell`: name, how much there is to do, how much is done."""

    def counted(name: str, count: int, do: Callable[..., Any]) -> Attack:
        return Attack(name, partial(do, seed=seed, count=count, on_done=partial(tell, name, count)))

    resets = partial(rapid_reset, streams_each=settings.num_resets_each)
    seconds = settings.reader_seconds
    return [
        Attack(CALM, partial(wait, seconds=settings.calm_seconds)),
        counted("mutated messages", settings.num_messages, fuzz),
        counted("malformed connections", settings.num_malformed, malformed),
        Attack("idle connections", partial(hold_idle, count=settings.num_idle)),
        counted("rapid reset", settings.num_reset_connections, resets),
        Attack("slow readers", partial(hold_unread, count=settings.num_slow_readers, seconds=seconds)),
        counted("HTTP: malformed requests", settings.num_malformed_http, malformed_http),
        Attack("HTTP: idle connections", partial(hold_idle_http, count=settings.num_idle_http)),
        Attack(
            "HTTP: readers that stop", partial(hold_unread_http, count=settings.num_stopped_readers, seconds=seconds)
        ),
        Attack("HTTP: viewers that stop", partial(hold_viewers, count=settings.num_viewers)),
        *SINGLES,
        *GATEWAY_SINGLES,
    ]


def _said(counter: Counter[str]) -> list[str]:
    return [f"{count:,} {what}" for what, count in counter.most_common()]


async def wait(arena: Arena, outcome: Outcome, seconds: float) -> None:
    await asyncio.sleep(seconds)


async def fuzz(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: Callable[[int], None]) -> None:
    """Mutated messages; a status that is none of the table's is a problem."""
    fuzzer = Fuzzer(arena, seed, count, on_done)
    await fuzzer.run()
    outcome.said += _said(fuzzer.outcomes)
    if fuzzer.defects:
        worst = "; ".join(f"{what} ({times} times)" for what, times in fuzzer.defects.most_common(2))
        outcome.problems.append(f"{fuzzer.defects.total()} messages were answered no status of the table, e.g. {worst}")


async def malformed(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: Callable[[int], None]) -> None:
    """Connections that begin with what no HTTP/2 client sends cost nothing but themselves."""
    outcome.said += _said(await connections.malformed(arena, seed, count, on_done))


async def rapid_reset(
    arena: Arena, outcome: Outcome, seed: int, count: int, on_done: Callable[[int], None], streams_each: int
) -> None:
    """Streams that are reset take no other call with them. Nothing is drawn."""
    outcome.said += _said(await connections.rapid_reset(arena, count, streams_each, on_done))


async def hold_idle(arena: Arena, outcome: Outcome, count: int) -> None:
    """Idle connections; while they are there, the cluster must take new ones and serve."""
    async with connections.idle(arena, count) as found:
        outcome.said += _said(found)
        await _judge_next_to(arena, outcome, f"{count} idle connections", count - found["open"])


async def _judge_next_to(arena: Arena, outcome: Outcome, what: str, num_refused: int = 0) -> None:
    if num_refused:
        outcome.problems.append(f"of {what} {num_refused} were not accepted")
    outcome.problems += [f"next to {what}: {one}" for one in await arena.problems(PATIENCE)]


async def hold_unread(arena: Arena, outcome: Outcome, count: int, seconds: float) -> None:
    """Streams that nobody reads: the worker ends them within the time, frees their blocks, and says so to who reads at last."""
    async with SlowReaders(arena, count) as readers:
        if left := await readers.until_freed(seconds):
            outcome.problems.append(f"{left} of {count} streams that are not read hold blocks after {seconds:g} s")
        statuses = await readers.statuses(seconds)
    outcome.said += _said(statuses)
    others = count - statuses[f"status {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}"]
    if others > 0:
        outcome.problems.append(f"{others} of {count} streams that were not read did not end with RESOURCE_EXHAUSTED")


async def malformed_http(arena: Arena, outcome: Outcome, seed: int, count: int, on_done: Callable[[int], None]) -> None:
    """Requests that are none, or not allowed, or wrong in what they ask for: no answer says that the gateway failed."""
    statuses = await over_http.malformed(arena.gateway_url, seed, count, on_done)
    outcome.said += _said(statuses)
    if failed := sum(times for said, times in statuses.items() if said.startswith("5") and said not in ("503", "504")):
        outcome.problems.append(f"{failed} requests were answered that the gateway has failed")


async def hold_idle_http(arena: Arena, outcome: Outcome, count: int) -> None:
    """Connections without a request, and with a part of one; meanwhile the gateway takes new ones and answers."""
    async with over_http.idle(arena.gateway_url, count) as num_open:
        outcome.said.append(f"{num_open:,} open")
        await _judge_next_to(arena, outcome, f"{count} idle connections", count - num_open)


async def hold_unread_http(arena: Arena, outcome: Outcome, count: int, seconds: float) -> None:
    """Long answers that nobody reads: the gateway closes their connections within the time."""
    url = arena.gateway_url
    total = await over_http.num_cut_off(url) + count
    async with over_http.unread(url, count, over_http.LONG_ANSWER):
        if left := await over_http.until_cut_off(url, total, seconds):
            outcome.problems.append(f"{left} of {count} readers that stopped have a connection after {seconds:g} s")


async def hold_viewers(arena: Arena, outcome: Outcome, count: int) -> None:
    """Event streams of the page that nobody reads; meanwhile the gateway answers."""
    async with over_http.unread(arena.gateway_url, count, over_http.EVENT_STREAM):
        await _judge_next_to(arena, outcome, f"{count} viewers")
