"""Managers as processes: forked by a process that has imported them, or their command where variables decide."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.cluster.fork_server import MANAGER_MODULE, ForkServer
from tests.cluster.process import Process, environment_with

Line = dict[str, Any]
_SECONDS: Final = 60.0


class Manager(Process):
    """A process whose log is JSON; its methods block."""

    fork_server = ForkServer(environment_with({}), modules=(MANAGER_MODULE,))
    _num_read = 0

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait(_SECONDS)

    def lines(self) -> list[Line]:
        """What it has logged and was not read."""
        texts = self.log.splitlines(keepends=True)[self._num_read :]
        return [json.loads(text) for text in texts if text.endswith("\n")]

    def next_line(self, event: str = "") -> Line:
        """The next line of the log, or the next that says this."""
        deadline = time.monotonic() + _SECONDS
        while True:
            may_log = self.status is None and time.monotonic() < deadline
            for line in self.lines():
                self._num_read += 1
                if event in ("", line["event"]):
                    return line
            assert may_log, f"no {event!r} in:\n{self.log}"
            time.sleep(0.002)


class Managers:
    """Starts managers with the variables of this process, each with a log in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0

    @contextmanager
    def listening(
        self, *arguments: str, variables: Mapping[str, str] | None = None, event: str = "listening"
    ) -> Iterator[tuple[Manager, Line]]:
        """A manager and its line that it listens, or stands by. Killed at the end if it still runs."""
        manager = self._start("--log-format", "json", *arguments, variables=variables)
        try:
            line = manager.next_line()
            assert line["event"] == event
            yield manager, line
        finally:
            manager.kill()

    @contextmanager
    def serving(self, state_dir: Path) -> Iterator[tuple[Manager, str, Line]]:
        """A manager on any free port: itself, its address, its line."""
        with self.listening("--port", "0", "--state-dir", str(state_dir)) as (manager, line):
            yield manager, line["address"], line

    def fails(self, *arguments: str, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit status and log of a manager that cannot start."""
        manager = self._start(*arguments, variables=variables)
        try:
            status = manager.wait()
        finally:
            manager.kill()
        assert "Traceback" not in manager.log
        return status, manager.log

    def _start(self, *arguments: str, variables: Mapping[str, str] | None) -> Manager:
        self._num_started += 1
        log = self._folder / f"{self._num_started}.log"
        log.touch()
        return Manager("manager", ["-m", MANAGER_MODULE, *arguments], log, variables or {})
