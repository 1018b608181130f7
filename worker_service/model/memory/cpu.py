"""Memory available to this process on a CPU: the machine's, or less in a container or service with a limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..control_groups import CGROUP, PROC, groups
from ..errors import ModelError


class CPUMemory(NamedTuple):
    """Memory in bytes."""

    total: int
    available: int
    """What can be allocated without swapping; the page cache counts, because the kernel frees it."""


class _Names(NamedTuple):
    """Files of a control group, and the field of memory.stat for memory that the kernel frees at once."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def read_cpu_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> CPUMemory:
    """The present numbers of the kernel. Raises ModelError if there are none."""
    total, available = _machine(proc)
    for folder, is_v2 in groups("memory", proc, cgroup):
        names = _V2 if is_v2 else _V1
        limit = _number(folder / names.limit)
        used = _number(folder / names.used)
        if limit is None or used is None:
            continue
        total = min(total, limit)
        available = min(available, max(0, limit - used + _reclaimable(folder, names)))
    return CPUMemory(total, available)


def _machine(proc: Path) -> CPUMemory:
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        text = ""
    fields = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    if len(fields) != 2:
        raise ModelError(f"The memory of this machine is unknown: {proc / 'meminfo'} lacks MemTotal or MemAvailable.")
    return CPUMemory(int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024)


def _number(file: Path) -> int | None:
    """The number in the file; None: there is no such file, or it contains `max`."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path, names: _Names) -> int:
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    match = re.search(rf"^{names.reclaimable} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0
