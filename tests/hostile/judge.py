"""What every part of the attack is judged by: the cluster afterwards, the good client during it, and what the logs took."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from tests.hostile.arena import Arena
from tests.hostile.attack import Attack
from tests.hostile.good_client import GoodClient

CALM: Final = "calm"
"""The part without an attack, with which the others compare."""
ANSWERS_AFTER: Final = 4
ANSWERS_SECONDS: Final = 90.0
"""For that many answers of the good client after each part, so that no call of it is judged before it has ended."""
LINES_A_MINUTE: Final = 100
LOOK_SECONDS: Final = 0.5
MAX_PROBLEMS: Final = 3
"""Of one kind that are written out."""


@dataclass
class Part:
    """One attack, and how the good client fared during it."""

    name: str
    said: str
    seconds: float
    call_seconds: list[float] = field(default_factory=list)
    """Of the good client's calls, sorted."""
    num_lines: dict[str, int] = field(default_factory=dict)
    """Logged meanwhile, by process."""
    problems: list[str] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Of the good client's calls, in seconds; 0 if there was none."""
        if len(self.call_seconds) < 2:
            return sum(self.call_seconds)
        if share >= 1:
            return self.call_seconds[-1]
        return statistics.quantiles(self.call_seconds, n=100, method="inclusive")[round(100 * share) - 1]


class LogWatch:
    """How many lines the processes of an arena log. Call `look` often: a minute is measured between two looks."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[str, int]] = {}
        """By log file: the process, and bytes that were read."""
        self._lines: dict[str, int] = {}
        self._looks: list[tuple[float, dict[str, int]]] = []
        self.most_in_a_minute: dict[str, int] = {}

    def begin(self, arena: Arena) -> None:
        """Watch the processes of now, from here on: what they said as they started does not count."""
        for name, process in arena.cluster.processes.items():
            self._files[process.log_path] = (name, process.log_path.stat().st_size)
            self._lines.setdefault(name, 0)

    def look(self) -> dict[str, int]:
        """Lines by process since the beginning."""
        for path, (name, position) in self._files.items():
            with path.open("rb") as file:
                file.seek(position)
                added = file.read()
            self._files[path] = (name, position + len(added))
            self._lines[name] += added.count(b"\n")
        now = time.monotonic()
        lines = dict(self._lines)
        self._looks = [look for look in self._looks if look[0] >= now - 60.0] + [(now, lines)]
        for name, count in lines.items():
            in_this = count - self._looks[0][1].get(name, 0)
            self.most_in_a_minute[name] = max(in_this, self.most_in_a_minute.get(name, 0))
        return lines


class Judge:
    """Runs attacks one after the other on an arena, beside one good client. `async with` starts both.

    `limit_seconds`: the longest that a call of the good client may take; None: times are not judged.
    """

    def __init__(self, arena: Arena, limit_seconds: float | None) -> None:
        self.arena = arena
        self.logs = LogWatch()
        self.num_rebuilt = 0
        """How often an attack left a cluster that had to be replaced."""
        self._limit_seconds = limit_seconds
        self._calm: Part | None = None
        """What was measured next to no attack."""
        self._good: GoodClient | None = None

    async def __aenter__(self) -> Self:
        await self.arena.__aenter__()
        await self._begin()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._end()
        await self.arena.__aexit__(*error)

    async def _begin(self) -> None:
        good = await self.arena.good_client().__aenter__()
        self._good = good
        assert await good.answers(ANSWERS_AFTER, ANSWERS_SECONDS), "the good client gets no answer before any attack"
        self.logs.begin(self.arena)

    async def _end(self) -> None:
        if self._good is not None:
            await self._good.__aexit__(None, None, None)
            self._good = None

    async def part(self, attack: Attack, patience: float) -> Part:
        """One attack. `patience`: seconds until the cluster must be as before. A cluster that is not is replaced. Where the good
        client must not be twice as slow as next to no attack, it is looked at for as long as then: of a few calls the slowest would
        be the 99th percentile."""
        good = self._good
        assert good is not None
        calm = self._calm if attack.is_as_calm and self._limit_seconds is not None else None
        lines_before = self.logs.look()
        began = time.monotonic()
        watching = asyncio.create_task(self._watch_logs())
        try:
            outcome = await attack.run(self.arena)
            if calm is not None:
                await asyncio.sleep(began + calm.seconds - time.monotonic())
        finally:
            watching.cancel()
        found = await self.arena.problems(patience)
        is_broken = bool(found)
        found = outcome.problems + found
        if not is_broken and not await good.answers(ANSWERS_AFTER, ANSWERS_SECONDS):
            found.append("the good client's next calls did not end")
            is_broken = True
        seconds = time.monotonic() - began
        if is_broken:
            # A client that waits for what is gone says so only at its time-out; here it is the cluster that has failed.
            await self._end()
        calls = good.since(began)
        wrong = [call.problem for call in calls if call.problem is not None]
        found += [f"good client: {problem}" for problem in wrong[:MAX_PROBLEMS]]
        if len(wrong) > MAX_PROBLEMS:
            found.append(f"good client: {len(wrong) - MAX_PROBLEMS} more of {len(calls)} calls wrong or lost")
        times = sorted(call.seconds for call in calls)
        if self._limit_seconds is not None and times and times[-1] > self._limit_seconds:
            slow = sum(one > self._limit_seconds for one in times)
            found.append(
                f"good client: {slow} of {len(times)} calls over {self._limit_seconds:g} s, the longest {times[-1]:.2f} s"
            )
        lines = {process: count - lines_before.get(process, 0) for process, count in self.logs.look().items()}
        if is_broken:
            self.num_rebuilt += 1
            await self.arena.rebuild()
            await self._begin()
        part = Part(attack.name, ", ".join(outcome.said), seconds, times, lines, found)
        if attack.name == CALM:
            self._calm = part
        if calm is not None and part.quantile(0.99) >= 2 * calm.quantile(0.99):
            part.problems.append(
                f"good client: p99 {part.quantile(0.99) * 1000:.0f} ms, next to no attack {calm.quantile(0.99) * 1000:.0f} ms"
            )
        return part

    async def _watch_logs(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.logs.look()

    def talkative(self) -> list[str]:
        """Processes that logged more than LINES_A_MINUTE in any minute."""
        return [
            f"{name} logged {count} lines within a minute, more than {LINES_A_MINUTE}"
            for name, count in self.logs.most_in_a_minute.items()
            if count > LINES_A_MINUTE
        ]
