"""What is measured of a cluster while it is soaked: how full its pools are, and what its processes hold."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.cluster.cluster import Cluster

WARM_UP: Final = 0.25
"""Share of the time in which everything is used for the first time."""
TAIL: Final = 0.25
GROWTH_BYTES: Final = 12 << 20
GROWTH_SHARE: Final = 0.02
"""Of a process from behind the warm-up to the end, at most the larger of both: a heap goes on fragmenting for long, and samples
differ. Twenty minutes are some fifty thousand requests for each worker, so a kilobyte left behind by each is more."""
GROWTH_FILES: Final = 8


class Holding(NamedTuple):
    """What a process holds at a moment."""

    at: float
    rss: int
    """Bytes in memory."""
    num_files: int
    """Open ones, sockets among them."""


@dataclass(frozen=True)
class Growth:
    """From the first samples behind the warm-up to the last ones, medians of both."""

    process: str
    rss_before: int
    rss_after: int
    files_before: int
    files_after: int

    @property
    def problems(self) -> list[str]:
        found = []
        if self.rss_after - self.rss_before > max(GROWTH_BYTES, GROWTH_SHARE * self.rss_before):
            found.append(f"{self.process} grew from {self.rss_before / 1e6:.1f} to {self.rss_after / 1e6:.1f} MB")
        if self.files_after - self.files_before > GROWTH_FILES:
            found.append(f"{self.process} opened files: {self.files_before}, then {self.files_after}")
        return found


def growth(process: str, holdings: Sequence[Holding]) -> Growth:
    """Of the samples of one process; at least eight."""
    assert len(holdings) >= 8, "too few samples tell nothing"
    began, ended = holdings[0].at, holdings[-1].at
    at_first = [h for h in holdings if WARM_UP <= (h.at - began) / (ended - began) <= WARM_UP + TAIL]
    at_last = [h for h in holdings if (ended - h.at) / (ended - began) <= TAIL]
    return Growth(
        process,
        *(round(statistics.median(h.rss for h in part)) for part in (at_first, at_last)),
        *(round(statistics.median(h.num_files for h in part)) for part in (at_first, at_last)),
    )


@dataclass
class Watch:
    """Looks until it is cancelled."""

    cluster: Cluster
    seconds_between: float
    usage: dict[str, list[float]] = field(default_factory=dict)
    """By worker: share of its pool that sequences and reserve hold."""
    holdings: dict[str, list[Holding]] = field(default_factory=dict)
    num_checks: int = 0
    violations: list[str] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.seconds_between)

    async def look(self) -> None:
        for name, process in self.cluster.processes.items():
            holding = Holding(time.monotonic(), process.resident_bytes, process.num_open_files)
            self.holdings.setdefault(name, []).append(holding)
        for worker in await self.cluster.describe():
            for counts in worker.counts:
                shares = self.usage.setdefault(worker.worker_id, [])
                shares.append((counts.held + counts.reserved) / counts.capacity)
        self.num_checks += 1
        self.violations += [f"check: {violation}" for violation in await self.cluster.audit()]
