"""What `--left-out` knows of a mutant and of a test file: which lines the one changes, and which the other executes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import left_out, tree
from tests.mutants.patch import Hunk

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
