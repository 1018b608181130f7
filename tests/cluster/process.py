"""A service as a process of its own, with its log in a file."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.client.processes import cpu_ticks
from tests.cluster.fork_server import ForkedProcess, ForkServer, ending_with_this_process
from tests.until import eventually

EXECUTE = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
"""For a program that is not in Python: its path and arguments follow `-c` and this."""


def computing(num_threads: int) -> dict[str, str]:
    """Variables of a service whose tensors are computed by this many threads."""
    # Threads that wait by spinning make each other ten times slower where cores are few and busy.
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "passive"}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", **variables}


class Process:
    """A Python program that runs until it ends by itself or is stopped."""

    fork_server: ClassVar[ForkServer | None] = None
    """Starts what it can start; None: every program is started as users start it."""

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], *, may_fork: bool = True
    ) -> None:
        """Start `python arguments…`; stdout and stderr are appended to `log`. `may_fork`: the fork server may start it."""
        self.name = name
        self.log_path = log
        environment = environment_with(environment)
        server = self.fork_server if may_fork else None
        self._process: subprocess.Popen[bytes] | ForkedProcess
        if server is not None and arguments[0] == "-m" and server.can_start(arguments[1], environment):
            self._process = server.start(arguments[1], arguments[2:], log)
            return
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ending_with_this_process(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def __repr__(self) -> str:
        return f"<{self.name} pid={self.pid} status={self.status}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, −n after signal n; None while it runs."""
        return self._process.poll()

    @property
    def cpu_seconds(self) -> float:
        """CPU time that it has used; it must be running."""
        return cpu_ticks(self.pid) / os.sysconf("SC_CLK_TCK")

    @property
    def resident_bytes(self) -> int:
        """What it has in memory; it must be running."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_open_files(self) -> int:
        """Sockets among them; it must be running."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def log(self) -> str:
        """All that was logged under this name, by earlier processes of the name too."""
        return self.log_path.read_text(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self.status is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, as a crash would, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self._process.wait(10)

    async def ended(self, seconds: float = 30.0) -> int:
        """Its exit status, once it has one."""

        async def has_ended() -> tuple[int] | None:
            return None if self.status is None else (self.status,)

        return (await eventually(has_ended, f"{self.name} ends", seconds))[0]
