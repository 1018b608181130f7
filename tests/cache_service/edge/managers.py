"""Managers as processes: forked by a process that has imported them, or their command where variables decide."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from tests.cluster.fork_server import MANAGER_MODULE, ForkedProcess, ForkServer

Line = dict[str, object]
_COMMAND: Final = (sys.executable, "-m", MANAGER_MODULE)
_END_SECONDS: Final = 60.0


class Manager:
    """A process and its log."""

    def __init__(self, process: ForkedProcess | subprocess.Popen[str], stderr: IO[str]) -> None:
        self._process = process
        self.stderr = stderr

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait(_END_SECONDS)

    def next_line(self, event: str) -> Line:
        """The next line of the log that says this."""
        for text in self.stderr:
            line: Line = json.loads(text)
            if line["event"] == event:
                return line
        raise AssertionError(f"it has ended without {event!r}")


class Managers:
    """Starts managers with the variables of this process, and stops what forks them at the end. Blocks; for one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0
        self._server = ForkServer(os.environ, modules=(MANAGER_MODULE,))

    def stop(self) -> None:
        self._server.stop()

    @contextmanager
    def listening(
        self, *arguments: str, variables: Mapping[str, str] | None = None, event: str = "listening"
    ) -> Iterator[tuple[Manager, Line]]:
        """A manager and its line that it listens, or stands by. Killed at the end if it still runs."""
        with self._started(("--log-format", "json", *arguments), variables) as manager:
            line = json.loads(manager.stderr.readline())
            assert line["event"] == event
            yield manager, line

    @contextmanager
    def serving(self, state_dir: Path) -> Iterator[tuple[Manager, str, Line]]:
        """A manager on any free port: itself, its address, its line."""
        with self.listening("--port", "0", "--state-dir", str(state_dir)) as (manager, line):
            yield manager, str(line["address"]), line

    def fails(self, *arguments: str, variables: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit status and stderr of a manager that cannot start."""
        with self._started(arguments, variables) as manager:
            said = manager.stderr.read()
            status = manager.wait()
        assert "Traceback" not in said
        return status, said

    @contextmanager
    def _started(self, arguments: Sequence[str], variables: Mapping[str, str] | None) -> Iterator[Manager]:
        """Variables: besides those of this process; then it is not forked."""
        process: ForkedProcess | subprocess.Popen[str]
        if variables is None:
            self._num_started += 1
            pipe = self._folder / f"{self._num_started}.pipe"
            os.mkfifo(pipe)
            process = self._server.start(MANAGER_MODULE, arguments, pipe)
            stderr: IO[str] = pipe.open()  # once the process has opened it too
        else:
            process = subprocess.Popen(
                [*_COMMAND, *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
            )
            assert process.stderr is not None
            stderr = process.stderr
        with stderr:
            try:
                yield Manager(process, stderr)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(_END_SECONDS)
