"""`python -m tests.simulation SEED --trace` replays one seed; `--seeds N` runs many (make prove KIND=simulate)."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from tests.simulation.runner import EXPECTED, REPEAT_EVERY, Totals, choose, run_all
from tests.simulation.world import Result, World
from tests.telling import told

MIN_OPERATIONS = 200
MIN_FAULTS = 5
LINE_SEEDS = 500
"""Between two lines of progress where there is no terminal."""


def replay(seed: int, *, is_traced: bool, console: Console) -> int:
    """One seed, with its trace; returns the exit status."""
    result = World(seed, is_traced=is_traced).run()
    for line in result.lines:
        print(line)
    if result.violation is not None:
        console.print(f"[bold red]broken[/] at {result.violation.at:.4f} s: {result.violation.law}")
        console.print(result.violation.message, markup=False)
    console.print(
        f"seed {seed}: {result.num_operations} operations, {result.num_faults} faults, {result.num_events} events, "
        f"{result.seconds:.1f} virtual seconds, trace {result.digest}",
    )
    return int(result.violation is not None)


def simulate(seeds: range, jobs: int, *, strict: bool, is_choice: bool, console: Console) -> int:
    """Many seeds; returns the exit status."""
    totals = Totals()
    reached: dict[int, set[str]] = {}
    began = time.monotonic()
    broken: list[Result] = []
    columns = MofNCompleteColumn(), TimeRemainingColumn()
    with told("simulating", *columns, is_worth_a_line=lambda done, of: done % LINE_SEEDS == 0 or done == of) as tell:
        for results in run_all(seeds, jobs):
            for result in results:
                totals.add(result)
                reached[result.seed] = {name for name in EXPECTED if result.counts[name]}
                totals.num_repeated += result.seed % REPEAT_EVERY == 0
                if result.violation is not None:
                    broken.append(result)
            tell(f"{len(broken)} broken" if broken else "all laws hold", totals.num_runs, len(seeds))
            if broken:
                break
    totals.show(console)
    seconds = time.monotonic() - began
    console.print(
        f"{totals.num_runs:,} seeds in {seconds:.0f} s ({totals.num_runs / seconds:.1f} per second, {jobs} processes); "
        f"{totals.num_repeated} of them twice with the same trace; at least {totals.fewest_operations} operations and "
        f"{totals.fewest_faults} faults each",
    )
    for result in broken:
        assert result.violation is not None
        console.print(f"[bold red]seed {result.seed} breaks a law[/]: {result.violation.law}")
        console.print(result.violation.message, markup=False)
        console.print(f"replay it: python -m tests.simulation {result.seed} --trace")
        for line in World(result.seed, is_traced=True).run().lines[-40:]:
            console.print(line[:240], markup=False)
    never = totals.never() if strict and not broken else []
    if never:
        console.print(f"[bold red]never reached[/]: {', '.join(never)}")
    too_few = not broken and (totals.fewest_operations < MIN_OPERATIONS or totals.fewest_faults < MIN_FAULTS)
    if too_few:
        console.print(f"[bold red]a seed has fewer than {MIN_OPERATIONS} operations or {MIN_FAULTS} faults[/]")
    if not (broken or never or too_few):
        console.print("[bold green]0 violations[/]")
    if is_choice:
        seeds_chosen = choose(reached)
        console.print(f"{len(seeds_chosen)} seeds reach all of it: {', '.join(map(str, seeds_chosen))}")
    return int(bool(broken or never or too_few))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="the one seed to run")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes to run them in")
    parser.add_argument("--lenient", action="store_true", help="what was never reached is no failure: for few seeds")
    parser.add_argument("--choose", action="store_true", help="print a few of the seeds that reach what all reach")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if arguments.seed is not None:
        return replay(arguments.seed, is_traced=arguments.trace, console=console)
    if not arguments.seeds or arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("needed a seed, or --seeds with the number of seeds to run")
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    strict, is_choice = not arguments.lenient, arguments.choose
    return simulate(seeds, arguments.jobs, strict=strict, is_choice=is_choice, console=console)


if __name__ == "__main__":
    sys.exit(main())
