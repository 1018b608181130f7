"""Cases of `make gpu`: what fails costs itself alone, and one deadline ends everything."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.gpu import device_tests
from scripts.gpu.cases import Case, Children, Deadline
from scripts.gpu.device_tests import read_report, run_device_tests
from scripts.gpu.parts import run_part
from scripts.gpu.results import Outcome, Report, Row
from scripts.gpu.setup import Setup
from tests.gpu import sample_cases

LONG = 300.0


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup("cpu", True, tmp_path)


@pytest.fixture
def children(setup: Setup) -> Iterator[Children]:
    with Children(setup) as found:
        yield found


def run(children: Children, *cases: Case, seconds: float = LONG) -> Report:
    report = Report("part", {}, tiny=True)
    run_part(report, cases, children, Deadline.within(seconds), lambda _: None)
    return report


def case(work: Callable[..., None], *arguments: Any, fresh: bool = False) -> Case:
    return Case(work.__name__, work, arguments, needs_fresh_process=fresh)


def outcomes(report: Report) -> dict[str, Outcome]:
    return {row.name: row.outcome for row in report.rows}


def test_a_failure_costs_its_own_case_alone(children: Children, tmp_path: Path) -> None:
    report = run(
        children,
        case(sample_cases.fails),
        case(sample_cases.dies),
        case(sample_cases.is_refused),
        case(sample_cases.passes, 1),
    )
    assert outcomes(report) == {
        "before": Outcome.PASSED,
        "fails": Outcome.FAILED,
        "dies": Outcome.FAILED,
        "a kernel": Outcome.REFUSED,
        "pass 1": Outcome.PASSED,
    }
    details = {row.name: row.detail for row in report.rows}
    assert "ValueError: this cannot work" in details["fails"]
    assert details["dies"] == "its process ended with status 3"
    assert not report.is_good
    content = json.loads(report.write(tmp_path).read_text())
    assert content["counts"] == {"passed": 3, "failed": 2, "refused": 1, "no time left": 0}
    assert content["good"] is False
    # Figures that are no numbers do not cost the file.
    assert content["rows"][-1]["figures"]["answer"] == "nan"


def test_what_is_refused_is_neither_a_pass_nor_a_failure_and_nothing_is_not_good(children: Children) -> None:
    report = run(children, case(sample_cases.is_refused))
    assert report.is_good
    assert report.counts["passed"] == 0
    assert "refused: a kernel" in "\n".join(report.lines())
    assert not Report("part", {}, tiny=True).is_good


def test_the_deadline_ends_what_runs_and_names_what_was_not_begun(children: Children) -> None:
    rows: list[Row] = []
    deadline = Deadline.within(LONG)
    ended: list[str] = []

    class UntilBegun(Deadline):
        """Over as soon as the case has begun, however long that takes."""

        @property
        def left_s(self) -> float:
            return 0.0 if rows else deadline.left_s

    cases = [case(sample_cases.hangs), case(sample_cases.passes, 1)]
    children.run(cases, UntilBegun(0.0), 1, lambda _, row: rows.append(row), lambda done: ended.append(done.name))
    assert [(row.name, row.outcome) for row in rows] == [
        ("begun", Outcome.PASSED),
        ("hangs: the rest", Outcome.NO_TIME),
        ("passes", Outcome.NO_TIME),
    ]
    assert ended == ["hangs", "passes"]
    with pytest.raises(ProcessLookupError):
        os.kill(rows[0].figures["process"], 0)


def test_rows_fail_one_by_one_until_the_device_is_lost(children: Children) -> None:
    report = run(children, case(sample_cases.has_failing_rows), case(sample_cases.passes, 1))
    assert outcomes(report) == {"first": Outcome.FAILED, "second": Outcome.PASSED, "pass 1": Outcome.PASSED}
    lost = run(children, case(sample_cases.loses_the_device), case(sample_cases.passes, 2))
    assert outcomes(lost) == {"first": Outcome.FAILED, "loses_the_device": Outcome.FAILED, "pass 2": Outcome.PASSED}
    # No case runs in a process whose device is lost.
    assert report.rows[-1].figures["process"] != lost.rows[-1].figures["process"]


def test_a_process_is_used_again_unless_a_case_needs_a_fresh_one(children: Children) -> None:
    cases = [case(sample_cases.passes, 1), case(sample_cases.passes, 2), case(sample_cases.passes, 3, fresh=True)]
    first, second, third = (row.figures["process"] for row in run(children, *cases).rows)
    assert first == second != third


def test_a_skipped_test_is_a_refusal_or_a_failure() -> None:
    """On the machine that it is marked for, a test that does not run for another reason hides something."""
    rows = read_report(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="good"/>
        <testcase classname="tests.a" name="kernel"><skipped message="refused: it is not installed"/></testcase>
        <testcase classname="tests.a" name="hidden"><skipped message="no CUDA device"/></testcase>
        <testcase classname="tests.a" name="bad"><failure message="m">assert 1 == 2</failure></testcase>
        <testcase classname="" name="tests.b"><error message="collection failure">no module x</error></testcase>
        </testsuite></testsuites>"""
    )
    assert [(row.name, row.outcome, row.detail) for row in rows] == [
        ("tests/a::good", Outcome.PASSED, ""),
        ("tests/a::kernel", Outcome.REFUSED, "it is not installed"),
        ("tests/a::hidden", Outcome.FAILED, "no CUDA device"),
        ("tests/a::bad", Outcome.FAILED, "assert 1 == 2"),
        ("::tests.b", Outcome.FAILED, "no module x"),
    ]


def test_tests_run_in_a_process_of_their_own_and_each_is_a_row(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(
        "import pytest, warnings\nfrom tests.refused import refused\n"
        "def test_good(): warnings.warn('another version warns of this')\n"
        "def test_bad(): assert not 'equal'\n"
        "def test_kernel(): refused('it is not installed')\n"
    )
    rows: list[Row] = []
    run_device_tests(setup, rows.append, [str(file)])
    assert {row.name.rpartition("::")[2]: row.outcome for row in rows} == {
        "test_good": Outcome.PASSED,
        "test_bad": Outcome.FAILED,
        "test_kernel": Outcome.REFUSED,
    }

    def no_test(_: str, command: list[str], *__: object) -> SimpleNamespace:
        (report,) = (one.removeprefix("--junitxml=") for one in command if one.startswith("--junitxml="))
        Path(report).write_text("<testsuites/>")
        return SimpleNamespace(status=5, log="no tests ran")

    monkeypatch.setattr(device_tests, "Process", no_test)
    empty: list[Row] = []
    run_device_tests(setup, empty.append)
    assert [row.outcome for row in empty] == [Outcome.FAILED], "a run without a test is no pass"
