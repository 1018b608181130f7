"""A service as a process of its own, with its log in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.polling import eventually

# Asks the kernel to end the child with the test's process, however that ends, and becomes the service.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Process:
    """A Python program that runs until it ends by itself or is told to."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        """Start `python arguments…`; stdout and stderr are appended to `log`."""
        self.name = name
        self.log_path = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
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
        # Behind the name, which may contain anything: state, ppid, …; 11 and 12 are utime and stime.
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
