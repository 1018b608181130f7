"""The results of `make bench KIND=serve`: repetitions by workload and side, and their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rich.table import Table

from bench.agreement import Agreement, Answers
from bench.our_cluster import Counts
from bench.report import Ratio, Series, print_table
from bench.serve_cases import MIXED, PLANS, sizes_of
from kvpool.load.figures import LoadFigures
from kvpool.load.plan import CacheCase
from kvpool.load.sample import LoadRun


class Measured(NamedTuple):
    """One repetition on one side."""

    run: LoadRun
    counts: Counts | None = None
    """Counters of kvpool's manager and worker during it; None: the side has no manager over gRPC."""
    answers: Answers = MappingProxyType({})


@dataclass(slots=True)
class Measurements:
    """Repetitions by workload, case and side, without the warm-up."""

    repetitions: dict[tuple[str, CacheCase, str], list[Measured]] = field(default_factory=dict)
    floors: dict[tuple[str, CacheCase], float] = field(default_factory=dict)
    """The least seconds of a run on this machine, by workload and case, if its speed was measured."""

    def add(self, workload: str, case: CacheCase, side: str, measured: Measured) -> None:
        """The next repetition."""
        self.repetitions.setdefault((workload, case, side), []).append(measured)

    def cases(self) -> list[tuple[str, CacheCase]]:
        """Workloads and cases, in the order in which they were measured."""
        return list(dict.fromkeys((workload, case) for workload, case, _ in self.repetitions))

    def sides(self, workload: str, case: CacheCase) -> dict[str, list[Measured]]:
        """The repetitions of one case by side."""
        return {side: found for (name, of, side), found in self.repetitions.items() if (name, of) == (workload, case)}

    def as_json(self) -> list[dict[str, Any]]:
        """One object per workload, case and side."""
        return [
            {
                "workload": workload,
                "case": case.value,
                "side": side,
                "floor_s": self.floors.get((workload, case)),
                **LoadFigures.of([one.run for one in found]).as_json(),
                "counts": [None if one.counts is None else one.counts.as_json() for one in found],
            }
            for (workload, case, side), found in self.repetitions.items()
        ]


METRICS: Final = ("run", "first token", "inter-token")
"""Compared metrics: the whole run, and the medians of its requests' times."""


def series(name: str, repetitions: Sequence[Measured]) -> Series:
    """One value per repetition, in seconds."""
    found = []
    for run in (one.run for one in repetitions):
        figures = LoadFigures.of([run])
        times = {"first token": figures.time_to_first_token, "inter-token": figures.inter_token}.get(name)
        found.append(run.seconds if times is None else times.median)
    return Series(name, found)


def show(measured: Measurements, ours: Sequence[str]) -> None:
    """Print a table of the sides, notes, and the ratios of kvpool's sides to the peers."""
    for workload, case in measured.cases():
        sides = measured.sides(workload, case)
        num_runs = min(len(found) for found in sides.values())
        floor_s = measured.floors.get((workload, case))
        floor = "" if floor_s is None else f"; floor {floor_s * 1000:,.0f} ms"
        sizes = sizes_of(PLANS.get(workload, MIXED))
        print(f"\n{workload}, {case}: {sizes}; median (least to most) of {num_runs} runs{floor}")
        table = Table("side", *METRICS, "tokens/s", "hit rate", "manager RPCs per request", box=None, pad_edge=False)
        notes = []
        for side, found in sides.items():
            figures = LoadFigures.of([one.run for one in found])
            work = OurWork.of(found)
            table.add_row(
                side,
                *(series(name, found).spread for name in METRICS),
                f"{figures.generated_per_second.median:.1f}",
                "-" if figures.hit_rate is None else f"{figures.hit_rate.median:.1%}",
                "-" if work is None else f"{work.num_rpcs / work.num_requests:.2f}",
            )
            notes += [f"  {side}: {note}" for note in _notes(figures, work)]
        print_table(table)
        for note in notes:
            print(note)
        for comparison in comparisons(sides, ours):
            print(f"  {comparison}")


class Comparison(NamedTuple):
    """Two sides in one case."""

    side: str
    against: str
    ratios: Mapping[str, Ratio]
    """By metric; above 1: `side` is faster."""
    agreement: Agreement

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        ratios = {name: ratio.as_json() for name, ratio in self.ratios.items()}
        return {"side": self.side, "against": self.against, **ratios, "agreement": self.agreement.as_json()}

    def __str__(self) -> str:
        ratios = ", ".join(f"{name} {ratio}" for name, ratio in self.ratios.items())
        return f"{self.side} against {self.against}: {ratios}; {self.agreement}"


def comparisons(sides: Mapping[str, Sequence[Measured]], ours: Sequence[str]) -> Iterator[Comparison]:
    """Each of kvpool's sides with each peer, and kvpool's sides with each other: the cost of gRPC. `ours` are names of kvpool's
    sides, the one with more processes last."""
    present = [side for side in ours if side in sides]
    pairs = [(our, side) for our in present for side in sides if side not in ours]
    for our, side in [*pairs, *zip(present[1:], present, strict=False)]:
        yield Comparison(
            our,
            side,
            {name: Ratio(series(name, sides[our]), series(name, sides[side])) for name in METRICS},
            Agreement.of([one.answers for one in sides[our]], [one.answers for one in sides[side]]),
        )


class OurWork(NamedTuple):
    """Work of kvpool's manager and worker for all complete requests of several repetitions."""

    num_requests: int
    num_generated_tokens: int
    rpcs: Counter[str]
    num_forwarded_tokens: int
    num_needed_tokens: int
    """Σ(prompt − cached + generated − 1): tokens forwarded if none is computed twice."""
    num_decodes_that_waited: int

    @property
    def num_rpcs(self) -> int:
        """RPCs to the manager."""
        return self.rpcs.total()

    @classmethod
    def of(cls, repetitions: Sequence[Measured]) -> OurWork | None:
        """None: the side has no manager over gRPC."""
        counts = [measured.counts for measured in repetitions if measured.counts is not None]
        if not counts:
            return None
        runs = LoadFigures.of([one.run for one in repetitions]).runs
        return cls(
            num_requests=sum(run.num_complete for run in runs),
            num_generated_tokens=sum(run.num_generated_tokens for run in runs),
            rpcs=sum((one.rpcs for one in counts), Counter()),
            num_forwarded_tokens=sum(one.num_forwarded_tokens for one in counts),
            num_needed_tokens=sum(
                run.num_prompt_tokens - (run.num_cached_tokens or 0) + run.num_generated_tokens - run.num_complete
                for run in runs
            ),
            num_decodes_that_waited=sum(one.num_decodes_that_waited for one in counts),
        )


def _notes(figures: LoadFigures, work: OurWork | None) -> Iterator[str]:
    """Lines for figures that are not in the table."""
    if figures.by_turn:
        yield "first token by turn, ms: " + ", ".join(
            f"{turn}: {found.median * 1000:.0f}" for turn, found in figures.by_turn.items()
        )
    if (waste := figures.waste) is not None:
        yield (
            f"KV waste {waste.waste:.2%} (most {waste.waste_max:.2%}, {waste.num_samples} samples), "
            f"unbound reserve {waste.reserve:.1%} of held slots"
        )
    if work is not None:
        rpcs = ", ".join(f"{number / work.num_requests:.2f} {method}" for method, number in sorted(work.rpcs.items()))
        yield (
            f"RPCs to the manager per request: {rpcs}; per 1,000 generated tokens: "
            f"{1000 * work.num_rpcs / work.num_generated_tokens:.1f}"
        )
        yield (
            f"tokens forwarded: {work.num_forwarded_tokens:,}, {work.num_needed_tokens:,} if nothing is computed twice; "
            f"decodes that waited for a call: {work.num_decodes_that_waited}"
        )


def ratios_as_json(measured: Measurements, ours: Sequence[str]) -> list[dict[str, Any]]:
    """Every comparison that `show` prints."""
    return [
        {"workload": workload, "case": case.value, **comparison.as_json()}
        for workload, case in measured.cases()
        for comparison in comparisons(measured.sides(workload, case), ours)
    ]
