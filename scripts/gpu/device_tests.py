"""The tests marked gpu, in a separate process."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.cluster.process import Process
from tests.refused import REFUSED

from .cases import AddRow
from .results import Outcome, Row
from .setup import Setup

_NUM_PROCESSES: Final = 6
_ON_GPU: Final = ("tests", "-m", "gpu")
_TINY: Final = ("tests/attention/test_selection.py", "-k", "plain_torch_passes_its_own or does_not_count_as_one")
_GLANCE_S: Final = 0.2
_LOG_CHARACTERS: Final = 3000


def run_device_tests(setup: Setup, add_row: AddRow, arguments: Sequence[str] = ()) -> None:
    """A row for each test. arguments: pytest's, instead of those for this setup."""
    with tempfile.TemporaryDirectory(dir=setup.folder) as folder:
        _run(
            add_row,
            list(arguments or (_TINY if setup.is_tiny else _ON_GPU)),
            is_parallel=setup.is_cuda,
            folder=Path(folder),
        )


def _run(add_row: AddRow, arguments: list[str], is_parallel: bool, folder: Path) -> None:
    report = folder / "tests.xml"
    # Other versions of packages may emit other warnings.
    command = ["-m", "pytest", *arguments, "--quiet", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
    if is_parallel and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(_NUM_PROCESSES)]
    environment = {"OMP_NUM_THREADS": "1"} if is_parallel else {}
    process = Process("pytest", command, folder / "pytest.log", environment)
    while process.status is None:
        time.sleep(_GLANCE_S)
    if not report.is_file():
        raise RuntimeError(f"pytest ended with status {process.status}:\n{process.log[-_LOG_CHARACTERS:]}")
    rows = list(read_report(report.read_text()))
    for row in rows:
        add_row(row)
    if not rows or (process.status != 0 and not any(row.outcome is Outcome.FAILED for row in rows)):
        add_row(Row("pytest", Outcome.FAILED, f"ended with status {process.status}:\n{process.log[-_LOG_CHARACTERS:]}"))


def read_report(xml: str) -> Iterator[Row]:
    """Rows of a JUnit report. A test skipped for another reason than a refusal counts as failed: it must run here."""
    for case in ElementTree.fromstring(xml).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', os.sep)}::{case.get('name')}"
        failed = [*case.findall("failure"), *case.findall("error")]
        skipped = case.find("skipped")
        if failed:
            yield Row(name, Outcome.FAILED, (failed[0].text or failed[0].get("message") or "")[-_LOG_CHARACTERS:])
        elif skipped is not None:
            reason = skipped.get("message") or ""
            is_refusal = reason.startswith(REFUSED)
            yield Row(name, Outcome.REFUSED if is_refusal else Outcome.FAILED, reason.removeprefix(REFUSED))
        else:
            yield Row(name)
