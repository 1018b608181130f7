"""Runs cases in separate processes with a common deadline: a case that fails, hangs or crashes affects no other."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from ..child_process import ChildProcess
from ..quiet import be_quiet
from .results import Outcome, Row
from .setup import Setup

_GLANCE_S = 1.0
"""Interval between checks of the deadline."""
_MAX_DETAIL = 4000
"""Characters kept of a failure's end."""

AddRow = Callable[[Row], None]


class DeviceLost(RuntimeError):
    """The device no longer responds in this process; the rest of the case was not tried."""


@dataclass(frozen=True, slots=True)
class Case:
    """A function that adds one or more rows."""

    name: str
    run: Callable[..., None]
    """A module-level function, called as run(setup, add_row, *arguments)."""
    arguments: tuple[Any, ...] = ()
    needs_fresh_process: bool = False
    """Needs a new process, without memory of earlier cases on the device."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time of the monotonic clock."""

    end_s: float

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """0 after the deadline."""
        return max(0.0, self.end_s - time.monotonic())


class Children:
    """Processes that run cases, started on demand; `with` ends all of them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._children: list[_Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all of them; new ones can be started afterwards."""
        for child in self._children:
            child.close()
        self._children.clear()

    def run(
        self,
        cases: Sequence[Case],
        deadline: Deadline,
        num_processes: int,
        on_row: Callable[[Case, Row], None],
        on_end: Callable[[Case], None],
    ) -> None:
        """Run all cases, at most num_processes at a time. Cases still running at the deadline are killed and get a row.

        on_row gets every row as it comes, on_end each case when it is over.
        """
        waiting = list(reversed(cases))
        while deadline.left_s > 0:
            while waiting and (idle := self._idle(num_processes)) is not None:
                idle.start(waiting.pop(), self._setup)
            busy = [child for child in self._children if child.case is not None]
            if not busy:
                return
            wait([child.connection for child in busy], min(_GLANCE_S, deadline.left_s))
            for child in busy:
                child.take(on_row, on_end)
        cut_off = [child.case for child in self._children if child.case is not None]
        self.close()
        for case in cut_off:
            on_row(case, Row(f"{case.name}: the rest", Outcome.NO_TIME, "it ran when the time was over"))
            on_end(case)
        for case in reversed(waiting):
            on_row(case, Row(case.name, Outcome.NO_TIME, "it was not begun"))
            on_end(case)

    def _idle(self, num_processes: int) -> _Child | None:
        for child in self._children:
            if child.case is None:
                return child
        if len(self._children) >= num_processes:
            return None
        self._children.append(_Child())
        return self._children[-1]


class _Child:
    """A process that runs case after case."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self._is_fresh = True
        self._process = ChildProcess(_serve)

    @property
    def connection(self) -> Connection[Any, Any]:
        return self._process.connection

    def start(self, case: Case, setup: Setup) -> None:
        if case.needs_fresh_process and not self._is_fresh:
            self._process.restart()
        self.case, self._is_fresh = case, False
        self.connection.send((case, setup))

    def take(self, on_row: Callable[[Case, Row], None], on_end: Callable[[Case], None]) -> None:
        """Read the process's messages."""
        case = self.case
        assert case is not None
        while self.connection.poll():
            try:
                message = self.connection.recv()
            except EOFError:
                status = self._process.status()
                on_row(case, Row(case.name, Outcome.FAILED, f"its process ended with status {status}"))
                message = _End(is_usable=False)
            if isinstance(message, Row):
                on_row(case, message)
                continue
            self.case = None
            on_end(case)
            if not message.is_usable:
                self._process.restart()
                self._is_fresh = True
            return

    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True, slots=True)
class _End:
    """A case has ended."""

    is_usable: bool
    """Whether its process can run another one."""


def _serve(connection: Connection[Any, Any]) -> None:
    be_quiet()
    while True:
        try:
            case, setup = connection.recv()
        except EOFError:
            return
        is_usable = True
        try:
            case.run(setup, connection.send, *case.arguments)
        except Exception as error:  # a case may raise anything
            connection.send(Row(case.name, Outcome.FAILED, failure(error)))
            is_usable = False  # its state is unknown
        connection.send(_End(is_usable))


def attempt(add_row: AddRow, name: str, work: Callable[[], Row]) -> bool:
    """Add the row that the work returns, or a failed one; returns whether it passed. Raises DeviceLost."""
    try:
        row = work()
    except Exception as error:  # as above
        add_row(Row(name, Outcome.FAILED, failure(error)))
        if _is_of_device(error):
            raise DeviceLost(f"after {name}: {error}") from error
        return False
    add_row(row)
    return row.outcome is Outcome.PASSED


def _is_of_device(error: Exception) -> bool:
    """Out of memory does not count: the next row may need less."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def failure(error: Exception) -> str:
    """The end of the traceback."""
    return "".join(traceback.format_exception(error)).strip()[-_MAX_DETAIL:]
