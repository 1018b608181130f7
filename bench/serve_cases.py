"""What `make bench-serve` sends to every side, and the tables of what came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.report import Ratio, Series
from kvpool.client.bench.arrivals import ClosedLoop
from kvpool.client.bench.figures import Figures
from kvpool.client.bench.plan import Case, Plan
from kvpool.client.bench.sample import Run
from kvpool.client.bench.workload import DEFAULT_SIZES, Sizes, Workload

COLD_AND_WARM: Final = (Case.COLD, Case.WARM)

PLANS: Final[Mapping[str, Plan]] = {
    "shared": Plan(Workload.SHARED, ClosedLoop(16), 16, DEFAULT_SIZES[Workload.SHARED], cases=COLD_AND_WARM),
    "unshared": Plan(Workload.UNSHARED, ClosedLoop(16), 16, DEFAULT_SIZES[Workload.UNSHARED]),
    "document": Plan(Workload.DOCUMENT, ClosedLoop(8), 8, DEFAULT_SIZES[Workload.DOCUMENT], cases=COLD_AND_WARM),
    "chats": Plan(Workload.CHATS, ClosedLoop(8), 8, DEFAULT_SIZES[Workload.CHATS]),
    "one": Plan(Workload.UNSHARED, ClosedLoop(1), 1, Sizes(prefix_tokens=0, own_tokens=64, generated_tokens=128)),
}
"""By name. All are closed loops in which every user begins at once; `one` is a single stream."""
MIXED: Final = Plan(Workload.MIXED, ClosedLoop(16), 64, DEFAULT_SIZES[Workload.MIXED])
"""For KV waste; our side alone."""


@dataclass(slots=True)
class Measurements:
    """Runs by workload, case and side; the warm-up is not among them."""

    runs: dict[tuple[str, Case, str], list[Run]] = field(default_factory=dict)

    def add(self, workload: str, case: Case, side: str, run: Run) -> None:
        """The next repetition."""
        self.runs.setdefault((workload, case, side), []).append(run)

    def cases(self) -> list[tuple[str, Case]]:
        """Workloads and cases, in the order in which they were measured."""
        return list(dict.fromkeys((workload, case) for workload, case, _ in self.runs))

    def sides(self, workload: str, case: Case) -> dict[str, list[Run]]:
        """The runs of one case by side."""
        return {side: runs for (name, of, side), runs in self.runs.items() if (name, of) == (workload, case)}

    def as_json(self) -> list[dict[str, Any]]:
        """One object per workload, case and side."""
        return [
            {"workload": workload, "case": case.value, "side": side, **Figures.of(runs).as_json()}
            for (workload, case, side), runs in self.runs.items()
        ]


METRICS: Final = ("run", "first token", "inter-token")
"""What is compared: a whole run, and the medians of its requests' times."""


def series(name: str, runs: Sequence[Run]) -> Series:
    """One value per repetition, in seconds."""
    found = []
    for run in runs:
        figures = Figures.of([run])
        times = {"first token": figures.time_to_first_token, "inter-token": figures.inter_token}.get(name)
        found.append(run.seconds if times is None else times.median)
    return Series(name, found)


def show(measured: Measurements, ours: Sequence[str]) -> None:
    """For people: each side's times, then each of ours against each peer."""
    for workload, case in measured.cases():
        sides = measured.sides(workload, case)
        print(f"\n{workload}, {case}: {_sizes(PLANS.get(workload, MIXED))}")
        for side, runs in sides.items():
            figures = Figures.of(runs)
            hit_rate = "not told" if figures.hit_rate is None else f"{figures.hit_rate.median:.1%}"
            times = "; ".join(f"{name} {series(name, runs)}" for name in METRICS)
            print(f"  {side:<24} {times}; {figures.generated_per_second.median:.1f} tokens/s; hit rate {hit_rate}")
            if figures.by_turn:
                turns = ", ".join(f"{turn}: {found.median * 1000:.0f}" for turn, found in figures.by_turn.items())
                print(f"  {'':<24} first token by turn, ms: {turns}")
            if (waste := figures.waste) is not None:
                print(
                    f"  {'':<24} KV waste {waste.waste:.2%} (most {waste.waste_max:.2%}, {waste.num_samples} samples), "
                    f"unbound reserve {waste.reserve:.1%} of held slots"
                )
        for our in ours:
            for side in (side for side in sides if our in sides and side not in ours):
                ratios = ", ".join(
                    f"{name} {Ratio(series(name, sides[our]), series(name, sides[side]))}" for name in METRICS
                )
                print(f"  {our} against {side}: {ratios}")


def ratios_as_json(measured: Measurements, ours: Sequence[str]) -> list[dict[str, Any]]:
    """Every ratio that `show` prints; above 1: ours is faster."""
    found = []
    for workload, case in measured.cases():
        sides = measured.sides(workload, case)
        for our in (side for side in ours if side in sides):
            for side in (side for side in sides if side not in ours):
                ratios = {
                    name: Ratio(series(name, sides[our]), series(name, sides[side])).as_json() for name in METRICS
                }
                found.append({"workload": workload, "case": case.value, "side": our, "against": side, **ratios})
    return found


def _sizes(plan: Plan) -> str:
    sizes = plan.sizes
    turns = f" x {sizes.turns} turns" if sizes.turns > 1 else ""
    return (
        f"{plan.num_conversations}{turns} of {sizes.prefix_tokens} shared + {sizes.own_tokens} own + "
        f"{sizes.generated_tokens} generated tokens"
    )
