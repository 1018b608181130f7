"""What many runs have reached, and what none of them has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from kvpool.cache_service.core.restored import Case
from tests.simulation.faults import FAULTS
from tests.simulation.laws import OF_THE_CORE, OF_THE_WHOLE
from tests.simulation.strangers import KINDS
from tests.simulation.world import LAYOUTS, Result

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
