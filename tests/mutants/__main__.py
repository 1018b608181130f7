"""`python -m tests.mutants [NAME…]`: make each mistake in a copy of the code, and see that something notices.

Every mutant gets a copy of its own, in which the simulator, the tests and the exhaustive search run until the first of them fails.
The copy without a mistake has to pass all of them first. Exit status 1 if a mutant lives, 2 if there is no verdict.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tests.mutants import killers, left_out, patch, tree
from tests.mutants.patch import Mutant, PatchError
from tests.mutants.progress import in_parallel


class Outcome(NamedTuple):
    mutant: Mutant
    verdicts: list[killers.Verdict]

    @property
    def killed_by(self) -> str:
        return "; ".join(f"{verdict.killer}: {verdict.by}" for verdict in self.verdicts if verdict.by)

    @property
    def trouble(self) -> str:
        """Why there is no verdict, or less of one."""
        return "; ".join(f"{verdict.killer}: {verdict.trouble}" for verdict in self.verdicts if verdict.trouble)

    @property
    def seconds(self) -> float:
        return sum(verdict.seconds for verdict in self.verdicts)


def _try(mutant: Mutant, pristine: Path, folder: Path, chosen: list[str], go_on: bool) -> Outcome:
    """One mutant against the killers, up to the first that kills it or, with `go_on`, all of them."""
    root = folder / mutant.name
    verdicts: list[killers.Verdict] = []
    try:
        tree.copy(pristine, root)
        tree.mutate(mutant, root)
        killers.imports(root, mutant.paths)
        for killer in killers.order(mutant, chosen):
            verdict = killers.look(killer, mutant, root)
            if killer == "tests" and verdict.by and not killers.passes(verdict.by, pristine):
                verdict = verdict._replace(by="", trouble=f"{verdict.by} fails without the mistake too")
            verdicts.append(verdict)
            if verdict.by and not go_on:
                break
    except killers.Undecided as why:
        verdicts.append(killers.Verdict("import", "", 0.0, str(why)))
    finally:
        shutil.rmtree(root)
    return Outcome(mutant, verdicts)


def _baseline(pristine: Path, mutants: list[Mutant], chosen: list[str], jobs: ThreadPoolExecutor) -> list[str]:
    """What is wrong without any mistake. Of tests that mutants name, those that fail are run without the mistake later."""
    if all(mutant.tests for mutant in mutants):
        chosen = [killer for killer in chosen if killer != "tests"]
    try:
        killers.imports(pristine, [path for name in patch.names() for path in patch.read(name).paths])
    except killers.Undecided as why:
        return [str(why)]
    verdicts = jobs.map(lambda killer: killers.look(killer, None, pristine), chosen)
    wrong = [verdict for verdict in verdicts if verdict.by or verdict.trouble]
    return [
        f"{verdict.killer}: {verdict.by or verdict.trouble}"
        for verdict in wrong
        if verdict.killer != "tests" or not verdict.by or not killers.passes(verdict.by, pristine)
    ]


def _say(outcome: Outcome) -> str:
    return escape(outcome.killed_by) or f"[red]nothing[/] {escape(outcome.trouble)}"


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("mutant", "mistake", Column("killed by", overflow="fold"), "seconds")
    for outcome in outcomes:
        table.add_row(outcome.mutant.name, escape(outcome.mutant.mistake), _say(outcome), f"{outcome.seconds:.1f}")
    return table


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all if none is named")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--killer", action="append", choices=killers.KILLERS, help="only this one; may be repeated")
    parser.add_argument("--every", action="store_true", help="do not stop at the first killer that kills")
    parser.add_argument("--source", type=Path, default=tree.ROOT, help="another checkout to take the code from")
    parser.add_argument(
        "--left-out", action="store_true", help="what each test file alone kills; --left-out --help: how"
    )
    if "--left-out" in arguments:
        return left_out.main([argument for argument in arguments if argument != "--left-out"])
    options = parser.parse_args(arguments)
    console = Console()
    chosen = options.killer or list(killers.KILLERS)
    began = time.monotonic()
    try:
        mutants = [patch.read(name) for name in options.names or patch.names()]
        for mutant in mutants:
            patch.mutated(mutant, options.source)
    except PatchError as error:
        console.print(str(error), markup=False)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvpool-mutants-") as name, ThreadPoolExecutor(options.jobs) as jobs:
        folder = Path(name)
        pristine = folder / "pristine"
        tree.copy(options.source, pristine)
        console.print(f"without a mistake: {', '.join(chosen)} …")
        wrong = _baseline(pristine, mutants, chosen, jobs)
        if wrong:
            console.print(
                "The code fails without any mistake, so nothing can be said of mutants:", *wrong, sep="\n", markup=False
            )
            return 2
        by_name = {mutant.name: mutant for mutant in mutants}

        def tried(name: str) -> Outcome:
            return _try(by_name[name], pristine, folder, chosen, options.every)

        outcomes = in_parallel("mutants", list(by_name), jobs, console, tried, _say)
    console.print(_table(outcomes))
    living = [outcome.mutant.name for outcome in outcomes if not outcome.killed_by]
    console.print(
        f"{len(outcomes) - len(living)} of {len(outcomes)} mutants killed in {time.monotonic() - began:.0f} s"
    )
    if living:
        console.print(f"[red]alive: {', '.join(living)}[/]: no test sees these mistakes")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
