"""What looks for a mutant, the cheapest first: tests that it names, the simulator, all the tests, the exhaustive search."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.mutants import tree
from tests.mutants.patch import Mutant

SEEDS = 12
"""Seeds of the simulator."""
MAX_STATES = 600
"""States of each world that the exhaustive search looks at."""
TESTS = (
    "tests/cache_service/core",
    "tests/worker_service",
    "--ignore=tests/cache_service/core/test_core_integrity.py",
    "--ignore=tests/cache_service/core/test_core_online_audit.py",
    "--deselect=tests/cache_service/core/test_core_state_machine.py::test_no_law_breaks_whatever_the_network_does",
)
"""What pytest runs for a mutant that names no tests. Left out are the tests of the audit itself, and long histories, of which the
simulator has more."""
_TEST_SECONDS = 60
"""Beyond that a single test has failed: none takes ten, and a mutant may have it wait for ever."""
_SECONDS = 600.0
"""Beyond that a killer has not come to an end, which is no verdict."""


class Verdict(NamedTuple):
    """What one killer has said of one copy."""

    killer: str
    by: str
    """The law or test that was broken; empty if none was."""
    seconds: float
    trouble: str = ""
    """Why it could not look, if it could not."""


class Undecided(Exception):
    """A killer came to no verdict; the message says why."""


def _run(
    command: list[str], root: Path, seconds: float = _SECONDS, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status and output of a program in a copy. Raises Undecided."""
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment or tree.environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Undecided(f"no end after {seconds:g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output


def imports(root: Path, paths: list[str]) -> None:
    """Require that a copy imports itself, and can. Raises Undecided."""
    status, output = _run(tree.import_command(root, paths), root)
    if status:
        raise Undecided(f"cannot be imported: {output.strip().splitlines()[-1]}")


def _search(root: Path, *arguments: str) -> str:
    status, output = _run([sys.executable, "-m", "tests.mutants.searches", *arguments], root)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if status == 1 and last.startswith("BROKEN "):
        return last.removeprefix("BROKEN ")
    if status:
        raise Undecided(f"exit status {status}: {last}")
    return ""


def first_failed(status: int, output: str) -> str:
    # A line of the log begins with its level too, and with more than one space after it.
    found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    if status == 1 and found:
        return found[1]
    if status:
        raise Undecided(f"pytest ended with {status}: {output.strip().splitlines()[-1]}")
    return ""


def _pytest(root: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={root / '.pytest_cache'}", "--tb=line"]
    command += [f"--timeout={_TEST_SECONDS}", *arguments]
    return _run(command, root, environment=environment)


def run_tests(tests: tuple[str, ...], root: Path, environment: Mapping[str, str]) -> Verdict:
    """What tests say of a copy in another environment than that of `tree`."""
    return _verdict("tests", lambda: first_failed(*_pytest(root, *tests, environment=environment)))


def order(mutant: Mutant, chosen: list[str]) -> list[str]:
    """The cheapest killer first: for a mutant that names its tests these, else the simulator."""
    return sorted(chosen, key=lambda killer: killer != "tests") if mutant.tests else chosen


KILLERS: dict[str, Callable[[Mutant | None, Path], str]] = {
    "simulation": lambda mutant, root: _search(root, "simulation", str(SEEDS)),
    "tests": lambda mutant, root: first_failed(*_pytest(root, *(mutant.tests if mutant and mutant.tests else TESTS))),
    "search": lambda mutant, root: _search(root, "exhaustive", str(MAX_STATES)),
}
"""What is broken; empty if nothing is. They raise Undecided."""


def look(killer: str, mutant: Mutant | None, root: Path) -> Verdict:
    """What one killer says of a copy; `mutant` None: the copy is not mutated."""
    return _verdict(killer, lambda: KILLERS[killer](mutant, root))


def _verdict(killer: str, look: Callable[[], str]) -> Verdict:
    began = time.monotonic()
    by = trouble = ""
    try:
        by = look()
    except Undecided as why:
        trouble = str(why)
    return Verdict(killer, by, time.monotonic() - began, trouble)


def passes(test: str, root: Path) -> bool:
    """Whether a test passes in a copy, at the second try if need be: one that fails there too has killed nothing."""
    for _ in range(2):
        try:
            if _pytest(root, test)[0] == 0:
                return True
        except Undecided:
            pass
    return False
