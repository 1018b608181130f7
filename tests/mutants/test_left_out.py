"""The command that finds what each test file alone kills and alone covers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import left_out, tree
from tests.mutants.left_out import Notes, Recorded
from tests.mutants.patch import Hunk, Mutant

CODE = """\
def first(
    x,
):
    if x and (
        x > 1
    ):
        return [
            x,
        ]
    return 0


NUMBER = 1
"""


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("            x,\n", "            x + 1,\n", {7, 8, 9}),  # of a statement of several lines, all
        ("        x > 1\n", "        x >= 1\n", {4, 5, 6}),  # of a compound one its head
        ("        ]\n    return 0\n", "        ]\n    return 1\n", {10}),  # not what is the same
        ("    return 0\n", "    return 0\n    return 1\n", {10}),  # where lines are only added, what is next to them
        ("NUMBER = 1\n", "", {13}),
    ],
)
def test_a_change_is_in_whole_statements(before: str, after: str, lines: set[int]) -> None:
    """Python notes the lines at which parts of a statement begin, which are seldom those that a mutant changes."""
    assert left_out.changed_lines(Hunk("client/gate.py", before, after), CODE) == lines


def _mutant(name: str, *tests: str) -> Mutant:
    return Mutant(name, "", "", "", "", tests, ())


def _recorded(seconds: float, *numbers: int, trouble: str = "") -> Recorded:
    return Recorded(seconds, trouble, frozenset(("client/gate.py", number) for number in numbers))


def test_a_mutant_is_run_where_a_changed_line_is_executed_and_first_where_it_is_expected_to_die() -> None:
    recorded = {
        "slow.py": _recorded(9.0, 1, 2),
        "fast.py": _recorded(1.0, 2),
        "other.py": _recorded(0.1, 3),
        "named.py": _recorded(99.0, 2),
        "fails.py": _recorded(0.1, 2, trouble="fails.py::test"),
    }
    mutant = _mutant("m", "named.py::test")
    assert left_out.order(mutant, {("client/gate.py", 2)}, recorded) == ["named.py", "fast.py", "slow.py"]
    assert left_out.order(mutant, set(), recorded) == ["named.py"]  # of code in C no lines are recorded


def test_what_two_files_do_neither_does_alone() -> None:
    recorded = {"a.py": _recorded(1.0, 1, 2), "b.py": _recorded(1.0, 2, 3, 4), "c.py": _recorded(1.0, 2)}
    runs = {
        ("one", "a.py"): "a.py::test",
        ("one", "b.py"): "",
        ("two", "a.py"): "a.py::test",
        ("two", "b.py"): "b.py::test",
    }
    rows = left_out.alone(recorded, runs, [_mutant("one"), _mutant("two")])
    assert [(one.file, one.kills, one.num_lines) for one in rows] == [
        ("c.py", [], 0),
        ("b.py", [], 2),
        ("a.py", ["one"], 1),
    ]


def test_a_run_that_was_cut_off_is_continued(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    assert notes.recorded("tests/a.py") is None
    assert notes.runs() == {}
    recorded = _recorded(1.5, 1, 2)
    notes.record("tests/a.py", recorded)
    notes.ran("one", "tests/a.py", "tests/a.py::test")
    with (tmp_path / "runs.jsonl").open("a") as runs:
        runs.write('\n["two", "tes')
    again = Notes(tmp_path)
    again.ran("two", "tests/a.py", "")
    assert again.recorded("tests/a.py") == recorded
    assert again.runs() == {("one", "tests/a.py"): "tests/a.py::test", ("two", "tests/a.py"): ""}


PROGRAM = """
import os, signal, threading
from kvpool.client import gate
thread = threading.Thread(target=gate.Gate)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_lines_of_other_threads_and_of_programs_that_are_killed_are_recorded(tmp_path: Path) -> None:
    written = tmp_path / "lines"
    environment = tree.environment(tree.ROOT)
    environment["PYTHONPATH"] = f"{left_out.RECORDER}:{environment['PYTHONPATH']}"
    environment |= {"KVPOOL_LINES": str(written), "KVPOOL_LINES_ROOT": str(tree.ROOT)}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=tree.ROOT, check=False)
    assert found.returncode == -signal.SIGKILL
    source = (tree.ROOT / "client/gate.py").read_text(encoding="utf-8").splitlines()
    inside = source.index("    def __init__(self) -> None:") + 2
    lines = written.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("client/gate.py:") and int(line.rpartition(":")[2]) >= inside for line in lines)
    assert {line.split("/")[0] for line in lines} <= {*tree.NEEDED}
