"""What an attack costs a process of the cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.hostile.arena import Arena
from tests.hostile.attack import Outcome

MOST_MB: Final = 96
"""What one message, or a handful, may add to a process at its highest: 16 MiB are held several times on their way."""
CPU_SHARE: Final = 0.5
"""Of one core, that a process may use all the time, the calls of the good client included."""


@contextmanager
def bounded(
    arena: Arena, outcome: Outcome, name: str, *, most_mb: int = MOST_MB, most_cpu_seconds: float | None = None
) -> Iterator[None]:
    """Judge how much a process grows meanwhile at its highest, in MiB, and the CPU time beyond CPU_SHARE; None: not judged."""
    process = arena.cluster.processes[name]
    # Let the peak begin at what it has now; the kernel counts on from there.
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    num_bytes, cpu_seconds, began_at = process.resident_bytes, process.cpu_seconds, time.monotonic()
    yield
    if process.status is not None:
        return
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    peak_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    grown = (peak_bytes - num_bytes) >> 20
    outcome.said.append(f"{name} grew by up to {grown} MiB")
    if grown > most_mb:
        outcome.problems.append(f"{name} grew by {grown} MiB, more than {most_mb}")
    if most_cpu_seconds is None:
        return
    used = process.cpu_seconds - cpu_seconds
    most = most_cpu_seconds + CPU_SHARE * (time.monotonic() - began_at)
    outcome.said.append(f"{name} used {used:.1f} s of CPU")
    if used > most:
        outcome.problems.append(f"{name} used {used:.1f} s of CPU, more than {most:.1f}")
