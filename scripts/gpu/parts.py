"""Runs the parts in order, each with the deadline of its group."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .cases import AddRow, Case, Children, Deadline, failure
from .facts import probe
from .results import Outcome, Report, Row
from .setup import Setup

GROUPS: Final = (("facts", "check"), ("step", "serve"))
"""Parts with a common deadline: one call each if the time of a command is limited."""
PARTS: Final = tuple(part for group in GROUPS for part in group)
_NUM_PROCESSES: Final = {"check": 6}
"""For tiny models; measurements run alone."""

Say = Callable[[str], None]


class NoDevice(Exception):
    """The device is missing; the message has torch's view."""


@dataclass(frozen=True, slots=True)
class Run:
    """The arguments of a run."""

    setup: Setup
    parts: Sequence[str]
    """In any order; they run in the order of PARTS."""
    seconds: float
    """For the parts of one group together."""
    out: Path


def run_parts(run: Run, say: Say) -> list[Report]:
    """Run the parts, write a file for each, and report progress. Raises NoDevice before a file is written."""
    reports = []
    with Children(run.setup) as children:
        for group in GROUPS:
            chosen = [part for part in group if part in run.parts]
            deadline = Deadline.within(run.seconds)
            machine = _machine(children, deadline) if chosen else {}
            for part in chosen:
                report = Report(part, machine, run.setup.is_tiny)
                run_part(report, _cases(part, run.setup), children, deadline, say)
                say(f"wrote {report.write(run.out)}")
                reports.append(report)
                if not run.setup.is_tiny:
                    children.close()  # frees the device for the next part
    return reports


def run_part(report: Report, cases: Sequence[Case], children: Children, deadline: Deadline, say: Say) -> None:
    """Run these cases into the report, with progress."""
    part, began, num_over = report.part, time.monotonic(), 0

    def on_row(case: Case, row: Row) -> None:
        report.rows.append(row)
        if row.outcome in (Outcome.FAILED, Outcome.NO_TIME):
            say(f"{part}: {row.name}: {row.outcome}")

    def on_end(case: Case) -> None:
        nonlocal num_over
        num_over += 1
        say(f"{part}: {num_over} of {len(cases)}, {case.name}; {deadline.left_s:.0f} s left")

    children.run(cases, deadline, 1 if report.tiny else _NUM_PROCESSES.get(part, 1), on_row, on_end)
    report.seconds = time.monotonic() - began


def _cases(part: str, setup: Setup) -> Sequence[Case]:
    """The part's cases. If its module fails, that is a failed case, and the other parts run."""
    try:
        found: Sequence[Case] = importlib.import_module(f"{__package__}.{part}").cases(setup)
    except Exception as error:  # a broken package may raise anything
        return [Case(part, _fail, (failure(error),))]
    return found


def _fail(setup: Setup, add_row: AddRow, why: str) -> None:
    add_row(Row("its cases", Outcome.FAILED, why))


def _machine(children: Children, deadline: Deadline) -> dict[str, Any]:
    """Facts for the head of each file; empty if time ran out. Raises NoDevice."""
    rows: list[Row] = []
    children.run([Case("device", probe)], deadline, 1, lambda _, row: rows.append(row), lambda _: None)
    if any(row.outcome is Outcome.FAILED for row in rows):
        raise NoDevice(rows[0].detail)
    return rows[0].figures
