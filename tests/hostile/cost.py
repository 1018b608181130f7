"""What an attack costs a process of the cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from tests.hostile.arena import Arena
from tests.hostile.attack import Outcome

MOST_MB: Final = 96
"""What one message, or a handful, may add to a process at its highest: 16 MiB are held several times on their way."""
CPU_SHARE: Final = 0.5
"""Of one core, that a process may use all the time, the calls of the good client included."""


class Cost:
    """Memory at its highest, and CPU time, of a process from here on. Memory is in MiB."""

    def __init__(
        self, arena: Arena, name: str, *, most_mb: int = MOST_MB, most_cpu_seconds: float | None = None
    ) -> None:
        """`most_cpu_seconds`: beyond CPU_SHARE; None: it is not judged."""
        self._process = arena.cluster.processes[name]
        self._most_mb, self._most_cpu_seconds = most_mb, most_cpu_seconds
        # Let the peak begin at what it has now; the kernel counts on from there.
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        self._bytes, self._cpu_seconds = self._process.resident_bytes, self._process.cpu_seconds
        self._began_at = time.monotonic()

    def judge(self, outcome: Outcome) -> None:
        """Note how much it was, and what of it is too much."""
        process = self._process
        if process.status is not None:
            return
        grown = (_peak_bytes(process.pid) - self._bytes) >> 20
        outcome.said.append(f"{process.name} grew by up to {grown} MiB")
        if grown > self._most_mb:
            outcome.problems.append(f"{process.name} grew by {grown} MiB, more than {self._most_mb}")
        if self._most_cpu_seconds is None:
            return
        used = process.cpu_seconds - self._cpu_seconds
        most = self._most_cpu_seconds + CPU_SHARE * (time.monotonic() - self._began_at)
        outcome.said.append(f"{process.name} used {used:.1f} s of CPU")
        if used > most:
            outcome.problems.append(f"{process.name} used {used:.1f} s of CPU, more than {most:.1f}")


def _peak_bytes(pid: int) -> int:
    """The most that the process had in memory since it was told to count anew."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
