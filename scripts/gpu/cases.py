"""Cases in processes of their own, under one deadline: a case that fails, hangs or ends its process costs itself alone."""

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
"""Between looks at the clock."""
_MAX_DETAIL = 4000
"""Characters of a failure that are kept, its end."""

AddRow = Callable[[Row], None]


class DeviceLost(RuntimeError):
    """The device answers nothing any more in this process; what is left of the case was not tried."""


@dataclass(frozen=True, slots=True)
class Case:
    """Work that adds one row or several."""

    name: str
    run: Callable[..., None]
    """Of a module: run(setup, add_row, *arguments)."""
    arguments: tuple[Any, ...] = ()
    needs_fresh_process: bool = False
    """Nothing of an earlier case may be left on the device."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock."""

    end_s: float

    @classmethod
    def within(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """0 once it is over."""
        return max(0.0, self.end_s - time.monotonic())


class Children:
    """Processes that run cases, started as they are needed. `with` leaves none behind."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._children: list[_Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of them at once; others can be started afterwards."""
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
        """Run all cases, at most num_processes at a time. What is not over at the deadline is ended, and gets a row that says so.

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
    """A process that runs one case after another."""

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
        """Take what the process has to say."""
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
    """A case is over."""

    is_usable: bool
    """Whether its process may run another one."""


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
        except Exception as error:  # a case may fail in every way
            connection.send(Row(case.name, Outcome.FAILED, failure(error)))
            is_usable = False  # nothing is known of the state that it left
        connection.send(_End(is_usable))


def attempt(add_row: AddRow, name: str, work: Callable[[], Row]) -> bool:
    """AddRow the row that the work gives, or that it failed; whether it passed. Raises DeviceLost where going on makes no sense."""
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
    """Out of memory is none: the next row may need less."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def failure(error: Exception) -> str:
    """The end of the traceback."""
    return "".join(traceback.format_exception(error)).strip()[-_MAX_DETAIL:]
