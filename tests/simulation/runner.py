"""Runs many seeds, in several processes: what they have reached, what none of them has, and few that reach all of it."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from kvpool.cache_service.core.restored import Case
from tests.simulation.faults import FAULTS
from tests.simulation.laws import OF_THE_CORE, OF_THE_WHOLE
from tests.simulation.strangers import KINDS
from tests.simulation.world import LAYOUTS, Result, World

REPEAT_EVERY = 100
"""Each so-manieth seed is run twice, and the two traces must be the same."""
_SEEDS_PER_TASK = 10
TIMES = 2
"""How often everything is to be reached, where so many seeds reach it."""
SEEDS = (7, 8, 11, 20, 35, 40, 46, 70, 73, 85, 89, 94, 106, 125, 133, 134, 153)
"""Those of `make test`, which reach what is rare twice. `python -m tests.simulation --seeds 160 --choose` prints others, once a
change has taken something rare out of these."""


def run(seed: int) -> Result:
    """One seed; each `REPEAT_EVERY`th twice. Raises RuntimeError if it gives two runs."""
    result = World(seed).run()
    if seed % REPEAT_EVERY == 0:
        again = World(seed).run()
        if again.digest != result.digest:
            raise RuntimeError(f"seed {seed} has two traces: {result.digest} and {again.digest}")
    return result


def run_some(seeds: Sequence[int]) -> list[Result]:
    """Several seeds, up to the first that breaks a law."""
    results = []
    for seed in seeds:
        results.append(run(seed))
        gc.collect()  # a world is one large cycle
        if results[-1].violation is not None:
            break
    return results


def _begin_process() -> None:
    """What was imported is not gone through again after each run."""
    gc.collect()
    gc.freeze()


def run_all(seeds: Sequence[int], jobs: int) -> Iterator[list[Result]]:
    """In `jobs` processes, in the order of the seeds."""
    chunks = [seeds[at : at + _SEEDS_PER_TASK] for at in range(0, len(seeds), _SEEDS_PER_TASK)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin_process) as pool:
        try:
            yield from pool.map(run_some, chunks)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def choose(reached: Mapping[int, Set[str]]) -> list[int]:
    """A small set of seeds, of those whose reach is given: the one that adds most, again and again (greedy set cover)."""
    missing = Counter(name for names in reached.values() for name in names)
    for name, count in missing.items():
        missing[name] = min(count, TIMES)
    chosen: list[int] = []
    while any(missing.values()):
        left = (seed for seed in reached if seed not in chosen)
        chosen.append(max(left, key=lambda seed: sum(missing[name] > 0 for name in reached[seed])))
        missing.subtract({name: 1 for name in reached[chosen[-1]] if missing[name]})
    return sorted(chosen)


# -- what is reached

REASONS = (
    "NO_BLOCKS",
    "NOT_TRIED",
    "TOO_MANY_SEQUENCES",
    "UNKNOWN_WORKER",
    "STALE_SESSION",
    "STALE_REGISTER",
    "STALE_INCARNATION",
    "WORKER_ELSEWHERE",
    "FOREIGN_EPOCH",
    "STALE_CALL",
    "STALE_ATTEMPT",
    "RECOVERING",
)
"""Why the manager may refuse what workers and clients of ours say. The other reasons are for peers that are wrong;
tests/cache_service has them."""
NOT_HERE = (Case.NO_ROOM,)
"""The simulated clusters have room in their budget; tests/cache_service/core has one that has none."""
DOWNLINK = ("grant", "stop", "drain", "boundary")
NETWORK = (
    "dropped",
    "duplicated",
    "delayed",
    "reordered",
    "cut off",
    "late",
    "connection broken",
    "register reply lost",
    "report cut",
)
EVENTS = (
    "leases expired",
    "state file kept",
    "state file lost",
    "state file torn",
    "state file restored by hand",
    "epochs raised",
    "managers that took over",
    "leads lost",
    "managers that led at the same time",
    "older incarnations accepted",
    "workers that gave up",
    "made-up Registers taken",
    "streams that went on elsewhere",
    "preemptions",
    "prefixes waited for",
    "evictions",
    "blocks shared",
    "states from a snapshot",
    "states copied",
    "boundaries at the end of a prompt",
    "boundaries where prompts part",
    "boundaries that a request asked for",
    "boundaries at an interval",
    "windows named at the end of a text",
    "rings turned",
    "windows named",
    "windows not named for lack of blocks",
    "windows hit",
    "windows released to be evicted first",
    "forks",
    "forks without blocks",
    "forks of forks",
    "texts of forks",
    "blocks copied for forks",
    "parents that ended before their forks were known",
    "forks that ended before they were known",
    "sessions with an encoder",
    "encoders run",
    "encoders run for a decoder that hits",
    "units hit",
    "units waited for",
    "prefixes hit without their unit",
    "blocks of units evicted",
    "requests with several answers",
    "answers that went on elsewhere by themselves",
    "beam searches",
)
OUTCOMES = ("text", "cancelled", "InvalidRequest NEVER_FITS")


EXPECTED = (
    *(f"law: {name}" for name in (*OF_THE_CORE, *OF_THE_WHOLE)),
    *(f"fault: {name}" for name in (*FAULTS, *KINDS)),
    *(f"layout: {name}" for name in dict.fromkeys(LAYOUTS)),
    *(f"refusal: {name}" for name in REASONS),
    *(f"reconciliation: {case.value}" for case in Case if case not in NOT_HERE),
    *(f"downlink: {name}" for name in DOWNLINK),
    *(f"outcome: {name}" for name in OUTCOMES),
    *NETWORK,
    *EVENTS,
)
"""What has to be reached."""


@dataclass
class Totals:
    """Sums over runs."""

    counts: Counter[str] = field(default_factory=Counter)
    num_runs: int = 0
    num_repeated: int = 0
    """Runs that were done twice, with the same trace."""
    num_events: int = 0
    fewest_operations: int = 1 << 60
    fewest_faults: int = 1 << 60

    def add(self, result: Result) -> None:
        self.counts.update(result.counts)
        self.num_runs += 1
        self.num_events += result.num_events
        self.fewest_operations = min(self.fewest_operations, result.num_operations)
        self.fewest_faults = min(self.fewest_faults, result.num_faults)

    def never(self) -> list[str]:
        return [name for name in EXPECTED if not self.counts[name]]

    def show(self, console: Console) -> None:
        """As a table; a zero stands out."""
        table = Table("reached", "times", title=f"{self.num_runs:,} seeds, {self.num_events:,} events", box=None)
        table.columns[1].justify = "right"
        for name in (*EXPECTED, *sorted(self.counts.keys() - set(EXPECTED))):
            table.add_row(name, f"{self.counts[name]:,}" if self.counts[name] else "[bold red]0[/]")
        console.print(table)
