"""All attacks one after the other, twice, on one cluster, beside a good client."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.hostile import connections, over_http
from tests.hostile.arena import Arena
from tests.hostile.at_gateway import GATEWAY_SINGLES
from tests.hostile.attack import PATIENCE, Attack, Outcome
from tests.hostile.fuzz import fuzz
from tests.hostile.judge import CALM, Judge, Part
from tests.hostile.single import SINGLES
from tests.telling import Tell

GROWTH_BYTES: Final = 32 << 20
"""What the second round may add to a process."""
QUIET_SECONDS: Final = 5.0
"""Before memory is read, for what is on its way out."""
NUM_LEASES: Final = 4
"""Until the cluster must be as before, where a lease has to end first: until the attacker's ends, one more, the worker's next try,
and one for a busy machine."""
READER_SECONDS: Final = 1
WORKER_SETTINGS: Final = {"reader_seconds": READER_SECONDS}
"""Readers that do not read are ended sooner than by default, so that the wait is short."""
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
    arena = Arena(folder, lease_seconds=settings.lease_seconds, worker_settings=WORKER_SETTINGS)
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

    resets = partial(connections.rapid_reset, streams_each=settings.num_resets_each)
    seconds = settings.reader_seconds
    return [
        Attack(CALM, partial(wait, seconds=settings.calm_seconds)),
        counted("mutated messages", settings.num_messages, fuzz),
        counted("malformed connections", settings.num_malformed, connections.malformed),
        Attack("idle connections", partial(connections.hold_idle, count=settings.num_idle)),
        counted("rapid reset", settings.num_reset_connections, resets),
        Attack("slow readers", partial(connections.hold_unread, count=settings.num_slow_readers, seconds=seconds)),
        counted("HTTP: malformed requests", settings.num_malformed_http, over_http.malformed),
        Attack("HTTP: idle connections", partial(over_http.hold_idle, count=settings.num_idle_http)),
        Attack(
            "HTTP: readers that stop",
            partial(over_http.hold_unread, count=settings.num_stopped_readers, seconds=seconds),
        ),
        Attack("HTTP: viewers that stop", partial(over_http.hold_viewers, count=settings.num_viewers)),
        *SINGLES,
        *GATEWAY_SINGLES,
    ]


async def wait(arena: Arena, outcome: Outcome, seconds: float) -> None:
    await asyncio.sleep(seconds)
