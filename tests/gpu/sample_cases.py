"""Cases that go wrong, each in its own way."""

from __future__ import annotations

import os
import time

from scripts.gpu.cases import AddRow, attempt
from scripts.gpu.results import Outcome, Row
from scripts.gpu.setup import Setup


def passes(setup: Setup, add_row: AddRow, number: int) -> None:
    add_row(Row(f"pass {number}", figures={"process": os.getpid(), "answer": float("nan")}))


def fails(setup: Setup, add_row: AddRow) -> None:
    add_row(Row("before"))
    raise ValueError("this cannot work")


def dies(setup: Setup, add_row: AddRow) -> None:
    add_row(Row("before"))
    os._exit(3)


def is_refused(setup: Setup, add_row: AddRow) -> None:
    add_row(Row("a kernel", Outcome.REFUSED, "it is not installed"))


def hangs(setup: Setup, add_row: AddRow) -> None:
    add_row(Row("begun", figures={"process": os.getpid()}))
    while True:
        time.sleep(60)


def _raise(error: Exception) -> Row:
    raise error


def has_failing_rows(setup: Setup, add_row: AddRow) -> None:
    attempt(add_row, "first", lambda: _raise(ValueError("one")))
    attempt(add_row, "second", lambda: Row("second"))


def loses_the_device(setup: Setup, add_row: AddRow) -> None:
    attempt(add_row, "first", lambda: _raise(RuntimeError("CUDA error: an illegal memory access was encountered")))
    attempt(add_row, "second", lambda: Row("second"))
