"""Compares the speed of the manager's core, and of a worker's check of hits, in this tree and in a commit.

python -m bench.before_after COMMIT [--runs N] [--pairs N] [--only CASE ...] [--json]

`burst` and `steady` are the reference trace of bench.manager_core, replayed by the core alone, in CPU time. `hits` is the wall time
that a worker's cache side needs for the reply to an Allocate of 576 tokens, 512 of them cached; the least of 1,000. Each side is a
process. They run in turn, so that other programs slow both equally; the first one alternates. There are several pairs of processes,
because memory layout makes a difference of a few percent.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.table import Table

from bench.manager_core import ARRIVALS
from bench.recorder import Recorder
from bench.report import command_line, facts, print_table, progress
from bench.trace import Trace

ROOT: Final = Path(__file__).resolve().parent.parent
SIDE: Final = Path(__file__).with_name("replay_side.py")
CASES: Final = (*ARRIVALS, "hits")


@dataclass(frozen=True)
class Measured:
    """One case: seconds per run."""

    case: str
    before: list[float]
    after: list[float]

    @property
    def of_least(self) -> float:
        """The least of this tree's runs over the least of the commit's: least disturbed by other programs."""
        return min(self.after) / min(self.before)

    @property
    def of_pairs(self) -> list[float]:
        """One ratio for each pair of consecutive runs."""
        return [after / before for before, after in zip(self.before, self.after, strict=True)]


class Side:
    """A process with one tree's code, which runs cases on request."""

    def __init__(self, tree: Path, recordings: Path, seed: int, stack: ExitStack) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "common"))),
            "PYTHONHASHSEED": str(seed),
        }
        command = [sys.executable, "-P", str(SIDE), str(recordings)]
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process = stack.enter_context(process)
        assert process.stdin is not None
        assert process.stdout is not None
        self._asks, self._answers = process.stdin, process.stdout
        stack.callback(self._asks.close)

    def run(self, case: str) -> float:
        """Seconds of one run."""
        print(case, file=self._asks, flush=True)
        answer = self._answers.readline()
        if not answer:
            raise SystemExit(f"the process of {self._process.args!r} has ended: its error is above")
        return float(answer)


def unpack(commit: str, folder: Path) -> Path:
    """The files of a commit of this repository."""
    tree = folder / "before"
    tree.mkdir()
    archive = folder / "before.tar"
    subprocess.run(["git", "archive", "--output", str(archive), commit], cwd=ROOT, check=True)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(tree)], check=True)
    # Earlier commits lack these links, and would import an installed kvpool.
    for link in (ROOT / "common" / "kvpool").iterdir():
        copied = tree / "common" / "kvpool" / link.name
        if link.is_symlink() and not copied.exists():
            copied.symlink_to(link.readlink())
    return tree


def measure(commit: str, cases: list[str], num_runs: int, num_pairs: int) -> list[Measured]:
    """All cases in turn."""
    found = [Measured(case, [], []) for case in cases]
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        folder = Path(name)
        before = unpack(commit, folder)
        for case, num_per_step in ARRIVALS.items():
            recorder = Recorder(Trace(num_arrivals_per_step=num_per_step))
            recorder.run()
            recorder.recording.save(folder / case)
        for pair in range(num_pairs):
            progress(f"pair {pair + 1} of {num_pairs}")
            with ExitStack() as stack:
                sides = [(Side(tree, folder, pair, stack), is_after) for is_after, tree in enumerate((before, ROOT))]
                for run in range(num_runs + 1):
                    for measured in found:
                        for side, is_after in sides:
                            seconds = side.run(measured.case)
                            if run:  # the first one warms up
                                (measured.after if is_after else measured.before).append(seconds)
                    sides.reverse()
    return found


def show(commit: str, found: list[Measured]) -> None:
    """Print a table."""
    table = Table("case", box=None, pad_edge=False)
    for column in (f"{commit}, least", "this tree, least", "ratio of these", "median of pairs", "quartiles", "pairs"):
        table.add_column(column, justify="right")
    for one in found:
        low, middle, high = statistics.quantiles(one.of_pairs, n=4)
        table.add_row(
            one.case,
            _time(min(one.before)),
            _time(min(one.after)),
            f"{one.of_least:.3f}",
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            str(len(one.of_pairs)),
        )
    print_table(table)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def main() -> None:
    parser = command_line(__doc__, runs=10, of="runs of each side, by each pair of processes")
    parser.add_argument("commit", metavar="COMMIT", help="what to compare with")
    parser.add_argument("--pairs", type=int, default=5, help="of processes, one after the other (default 5)")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.runs < 1 or arguments.pairs * arguments.runs < 2:
        parser.error("--runs and --pairs must be at least 1, and one of them more")
    found = measure(arguments.commit, arguments.only, arguments.runs, arguments.pairs)
    if arguments.json:
        print(json.dumps({"commit": arguments.commit, "cases": list(map(asdict, found)), "facts": facts("grpcio")}))
        return
    show(arguments.commit, found)


if __name__ == "__main__":
    main()
