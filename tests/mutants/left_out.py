"""`python -m tests.mutants --left-out [TEST…]`: what would be missed if a test file were left out.

For each test file, first, the lines of the product that it executes. Then each mutant runs against the test files that execute a
line which it changes, until two of them have killed it: a mutant with two killers needs neither. Listed is, by file, what it alone
kills and how many lines it alone covers; alone among the files and the mutants of this run.

It takes a night for all. What is known is on the disk: a run that was ended is continued by the next one, as long as neither code
nor tests have changed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from tests.mutants import killers, patch, tree
from tests.mutants.patch import Hunk, Mutant, PatchError
from tests.mutants.progress import in_parallel

RECORDER = Path(__file__).parent / "recorder"
ENOUGH_KILLERS = 2
Line = tuple[str, int]
"""Path and number."""


class Recorded(NamedTuple):
    """A test file, run without a mistake."""

    seconds: float
    trouble: str
    """What fails in it; it is not asked for mutants then."""
    lines: frozenset[Line]
    """Of the product, that it executes."""


class Alone(NamedTuple):
    """What only one test file does."""

    file: str
    seconds: float
    kills: list[str]
    num_lines: int


# -- what a mutant changes


def changed_lines(hunk: Hunk, text: str) -> set[int]:
    """The lines of the statements in which a hunk changes something; of compound ones the head. Where it only inserts, those next
    to it."""
    before, after = hunk.before.splitlines(), hunk.after.splitlines()
    first = text[: text.index(hunk.before)].count("\n") + 1
    num_equal = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    rest = zip(reversed(before[num_equal:]), reversed(after[num_equal:]), strict=False)
    num_equal_at_end = next((i for i, (a, b) in enumerate(rest) if a != b), min(len(before), len(after)) - num_equal)
    begin, end = first + num_equal, first + len(before) - num_equal_at_end
    changed = range(begin, end) if begin < end else range(begin - 1, end + 1)
    found: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = range(node.lineno, max(last, node.lineno) + 1)
            if max(lines.start, changed.start) < min(lines.stop, changed.stop):
                found.update(lines)
    return found or set(range(first, first + len(before)))


def touched(mutant: Mutant, root: Path) -> set[Line]:
    """The lines of Python without which a test cannot notice the mutant."""
    found: set[Line] = set()
    for hunk in mutant.hunks:
        if not hunk.path.endswith(".py"):
            continue
        text = (root / hunk.path).read_text(encoding="utf-8")
        found.update((hunk.path, line) for line in changed_lines(hunk, text))
    return found


# -- what is known


class Notes:
    """What this state of code and tests has shown so far, on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _lines(self, file: str) -> Path:
        return self._folder / f"{file.replace('/', '+')}.json"

    def recorded(self, file: str) -> Recorded | None:
        try:
            found = json.loads(self._lines(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        lines = frozenset((path, line) for path, numbers in found["lines"].items() for line in numbers)
        return Recorded(found["seconds"], found["trouble"], lines)

    def record(self, file: str, recorded: Recorded) -> None:
        lines: dict[str, list[int]] = defaultdict(list)
        for path, line in sorted(recorded.lines):
            lines[path].append(line)
        text = json.dumps({"seconds": recorded.seconds, "trouble": recorded.trouble, "lines": lines})
        half = self._lines(file).with_suffix(".half")
        half.write_text(text, encoding="utf-8")
        half.rename(self._lines(file))

    def runs(self) -> dict[tuple[str, str], str]:
        """By mutant and test file: the test that killed it, empty if none did."""
        try:
            text = (self._folder / "runs.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        found = {}
        for line in text.splitlines():
            try:
                mutant, file, by = json.loads(line)
            except ValueError:
                continue  # the one that was being written when the run was ended
            found[mutant, file] = by
        return found

    def ran(self, mutant: str, file: str, by: str) -> None:
        with (self._folder / "runs.jsonl").open("a", encoding="utf-8") as runs:
            runs.write(f"\n{json.dumps([mutant, file, by])}")


def state_of(root: Path) -> str:
    """A name for the present code, tests and mutants."""
    digest = hashlib.sha256()
    for name in tree.NEEDED:
        for path in sorted((root / name).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".patch", ".proto", ".json", ".c", ".h", ".js"):
                digest.update(f"{path.relative_to(root)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


# -- runs


def record(file: str, root: Path) -> Recorded:
    """Run a test file in a copy without a mistake, and see which lines it and the programs that it starts execute."""
    with tempfile.TemporaryDirectory(prefix="kvpool-lines-") as folder:
        written = Path(folder) / "lines"
        environment = tree.environment(root)
        environment["PYTHONPATH"] = f"{RECORDER}:{environment['PYTHONPATH']}"
        environment |= {"KVPOOL_LINES": str(written), "KVPOOL_LINES_ROOT": str(root)}
        verdict = killers.run_tests((file,), root, environment)
        text = written.read_text(encoding="utf-8") if written.exists() else ""
    lines = (line.rpartition(":") for line in text.splitlines())
    found = frozenset((path, int(number)) for path, _, number in lines)
    return Recorded(verdict.seconds, verdict.by or verdict.trouble, found)


def order(mutant: Mutant, lines: set[Line], recorded: Mapping[str, Recorded]) -> list[str]:
    """The test files that may kill it: those that it names first, then the fastest. Of code in C nobody knows who executes it, so
    that only those that it names are asked."""
    named = {test.partition("::")[0] for test in mutant.tests}
    able = [
        file
        for file, of in recorded.items()
        if not of.trouble and (not lines.isdisjoint(of.lines) if lines else file in named)
    ]
    return sorted(able, key=lambda file: (file not in named, recorded[file].seconds))


def _try(mutant: Mutant, files: list[str], notes: Notes, pristine: Path, folder: Path) -> str:
    """Run a mutant against files until two have killed it; returns what is to be said of it."""
    known = notes.runs()
    root = folder / mutant.name
    killed: list[str] = []
    try:
        for file in files:
            by = known.get((mutant.name, file))
            if by is None:
                if not root.exists():
                    tree.copy(pristine, root)
                    tree.mutate(mutant, root)
                    killers.imports(root, mutant.paths)
                verdict = killers.look("tests", dataclasses.replace(mutant, tests=(file,)), root)
                by = verdict.by if not verdict.by or killers.passes(verdict.by, pristine) else ""
                notes.ran(mutant.name, file, by)
            if by:
                killed.append(file)
            if len(killed) == ENOUGH_KILLERS:
                break
    except killers.Undecided as why:
        return f"no verdict: {why}"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return f"{', '.join(killed) or 'nothing'} of {len(files)} files"


def alone(
    recorded: Mapping[str, Recorded], runs: Mapping[tuple[str, str], str], mutants: Iterable[Mutant]
) -> list[Alone]:
    """What each file does that no other one does, those that do least first."""
    files_of: dict[Line, list[str]] = defaultdict(list)
    for file, of in recorded.items():
        for line in of.lines:
            files_of[line].append(file)
    num_lines: dict[str, int] = defaultdict(int)
    for files in files_of.values():
        if len(files) == 1:
            num_lines[files[0]] += 1
    kills: dict[str, list[str]] = defaultdict(list)
    for mutant in mutants:
        killed_by = [file for file in recorded if runs.get((mutant.name, file))]
        if len(killed_by) == 1:
            kills[killed_by[0]].append(mutant.name)
    found = [Alone(file, of.seconds, kills[file], num_lines[file]) for file, of in recorded.items()]
    return sorted(found, key=lambda one: (len(one.kills), one.num_lines, one.file))


def table(rows: Iterable[Alone]) -> str:
    lines = ["| test file | seconds, recorded | it alone kills | lines it alone covers |", "|---|---|---|---|"]
    lines += [
        f"| {one.file} | {one.seconds:.1f} | {', '.join(one.kills) or '-'} | {one.num_lines or '-'} |" for one in rows
    ]
    return "\n".join(lines) + "\n"


# -- the command


def _test_files(arguments: list[str], root: Path) -> list[str]:
    found: set[str] = set()
    for argument in arguments:
        path = root / argument
        found.update(str(one.relative_to(root)) for one in ([path] if path.is_file() else path.rglob("test_*.py")))
    return sorted(found)


def main(arguments: list[str]) -> int:
    """The command line. Exit status 2 if it cannot begin."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants --left-out", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", default=["tests"], help="files or folders; all if none is named"
    )
    parser.add_argument("--mutant", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--changes", metavar="PATH", default="", help="only mutants that change files whose path begins so"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--notes", type=Path, default=tree.ROOT / ".cache/left-out", help="where what is known is kept")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        mutants = [patch.read(name) for name in options.mutant or patch.names()]
        mutants = [one for one in mutants if any(path.startswith(options.changes) for path in one.paths)]
        lines = {mutant.name: touched(mutant, tree.ROOT) for mutant in mutants if patch.mutated(mutant, tree.ROOT)}
    except PatchError as error:
        console.print(str(error), markup=False)
        return 2
    files = _test_files(options.tests, tree.ROOT)
    notes = Notes(options.notes / state_of(tree.ROOT))
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-left-out-") as name,
        ThreadPoolExecutor(options.jobs) as jobs,
    ):
        folder = Path(name)
        pristine = folder / "pristine"
        tree.copy(tree.ROOT, pristine)

        def recorded_of(file: str) -> Recorded:
            known = notes.recorded(file)
            if known is None:
                known = record(file, pristine)
                notes.record(file, known)
            return known

        def say(of: Recorded) -> str:
            return f"{of.seconds:.1f} s, {len(of.lines)} lines{f'; left out: {of.trouble}' if of.trouble else ''}"

        found = in_parallel("test files", files, jobs, console, recorded_of, lambda of: escape(say(of)))
        recorded = dict(zip(files, found, strict=True))
        by_name = {mutant.name: mutant for mutant in mutants}

        def tried(name: str) -> str:
            return _try(by_name[name], order(by_name[name], lines[name], recorded), notes, pristine, folder)

        in_parallel("mutants", list(by_name), jobs, console, tried, escape)
    rows = alone(recorded, notes.runs(), mutants)
    text = table(rows)
    (options.notes / "table.md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
