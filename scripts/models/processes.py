"""Trials in separate processes, so that a type that hangs or crashes costs one line of the result."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..child_process import ChildProcess
from ..quiet import be_quiet
from .outcome import Outcome, Result

_NICENESS = 10
_GLANCE_S = 1.0
"""Interval between checks of the running trials."""


def try_all(kinds: Sequence[str], num_processes: int, limit_s: float) -> Iterator[Outcome]:
    """Outcomes as they arrive. A trial that computes for longer than limit_s is killed, and counts as not built."""
    waiting = list(reversed(kinds))
    running = [_Worker() for _ in range(min(num_processes, len(kinds)))]
    idle = list(running)
    try:
        while waiting or len(idle) < len(running):
            while waiting and idle:
                idle.pop().start(waiting.pop())
            busy = [worker for worker in running if worker.kind is not None]
            wait([worker.connection for worker in busy], _GLANCE_S)
            for worker in busy:
                outcome = worker.outcome(limit_s)
                if outcome is not None:
                    idle.append(worker)
                    yield outcome
    finally:
        for worker in running:
            worker.close()


class _Worker:
    """A process that tries one type after another."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self._began_s = 0.0
        self._process = ChildProcess(_serve)

    @property
    def connection(self) -> Connection[Any, Any]:
        return self._process.connection

    def start(self, kind: str) -> None:
        self.kind, self._began_s = kind, self._cpu_s()
        self.connection.send(kind)

    def _cpu_s(self) -> float:
        """CPU time of the process so far, which other load on the machine does not affect."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def outcome(self, limit_s: float) -> Outcome | None:
        """The outcome of the running trial; None: not finished."""
        assert self.kind is not None
        kind, outcome = self.kind, None
        if self.connection.poll():
            try:
                outcome = self.connection.recv()
            except EOFError:
                status = self._process.status()
                outcome = Outcome(kind, Result.NOT_BUILT, f"its process ended with status {status}")
                self._process.restart()
        elif self._cpu_s() - self._began_s > limit_s:
            outcome = Outcome(kind, Result.NOT_BUILT, f"took more than {limit_s:.0f} s", seconds=limit_s)
            self._process.restart()
        if outcome is not None:
            self.kind = None
        return outcome

    def close(self) -> None:
        self._process.close()


def _serve(connection: Connection[Any, Any]) -> None:
    os.nice(_NICENESS)
    be_quiet()
    import torch

    from .trial import try_type

    torch.set_num_threads(1)
    while True:
        try:
            kind = connection.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as folder:
            connection.send(try_type(kind, Path(folder)))
