"""An attack by name, what comes of it, and what it may cost a process of the cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from tests.hostile.arena import Arena

PATIENCE: Final = 15.0
"""Seconds until the cluster must be as before, where no lease has to end first."""
MOST_MB: Final = 96
"""What one message, or a handful, may add to a process at its highest: 16 MiB are held several times on their way."""
CPU_SHARE: Final = 0.5
"""Of one core, that a process may use all the time, the calls of the good client included."""
OnDone = Callable[[int], None]
"""Told how much of an attack is done."""


@dataclass
class Outcome:
    said: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def count(self, counter: Counter[str]) -> None:
        """Say how often what came."""
        self.said += [f"{count:,} {what}" for what, count in counter.most_common()]

    async def judge_next_to(self, arena: Arena, what: str, num_refused: int = 0) -> None:
        """While `what` is there the cluster must take new connections and serve."""
        if num_refused:
            self.problems.append(f"of {what} {num_refused} were not accepted")
        self.problems += [f"next to {what}: {one}" for one in await arena.problems(PATIENCE)]


@dataclass(frozen=True)
class Attack:
    """What is done to a cluster. It reports what it was answered, and what is wrong that the cluster does not show afterwards."""

    name: str
    do: Callable[[Arena, Outcome], Coroutine[Any, Any, None]]
    costs_a_session: bool = False
    """The cluster may have to wait for leases until it is as before."""
    is_as_calm: bool = False
    """The good client's calls take no longer than next to no attack, at the 99th percentile less than twice as long."""

    async def run(self, arena: Arena) -> Outcome:
        """Do it. What ends it early is part of the outcome."""
        outcome = Outcome()
        try:
            await self.do(arena, outcome)
        except grpc.aio.AioRpcError as error:
            outcome.problems.append(f"a call that should work did not: {error.code().name}: {error.details()}")
        except (OSError, TimeoutError) as error:
            outcome.problems.append(f"could not connect: {error!r}")
        return outcome


async def status_of(call: Awaitable[object]) -> grpc.StatusCode:
    """What a call is answered."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@contextmanager
def bounded(
    arena: Arena, outcome: Outcome, name: str, *, most_mb: int = MOST_MB, most_cpu_seconds: float | None = None
) -> Iterator[None]:
    """Judge how much a process grows meanwhile at its highest, in MiB, and the CPU time beyond CPU_SHARE; None: not judged."""
    process = arena.cluster.processes[name]
    # Let the peak begin at what it has now; the kernel counts on from there.
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    num_bytes, cpu_seconds, began_at = process.resident_bytes, process.cpu_seconds, time.monotonic()
    yield
    if process.status is not None:
        return
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    peak_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    grown = (peak_bytes - num_bytes) >> 20
    outcome.said.append(f"{name} grew by up to {grown} MiB")
    if grown > most_mb:
        outcome.problems.append(f"{name} grew by {grown} MiB, more than {most_mb}")
    if most_cpu_seconds is None:
        return
    used = process.cpu_seconds - cpu_seconds
    most = most_cpu_seconds + CPU_SHARE * (time.monotonic() - began_at)
    outcome.said.append(f"{name} used {used:.1f} s of CPU")
    if used > most:
        outcome.problems.append(f"{name} used {used:.1f} s of CPU, more than {most:.1f}")
