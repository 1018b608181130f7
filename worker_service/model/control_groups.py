"""Memory and CPUs for this process: the machine's, or less in a container or service with a limit (control groups)."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from .errors import ModelError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


class ControlGroup(NamedTuple):
    """One control group. Its folder may not exist."""

    folder: Path
    is_v2: bool


def groups(controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[ControlGroup]:
    """The control groups that limit this process's memory or cpu, from its own up to the root."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limiting: list[ControlGroup] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        # In a container the process's own group is mounted as the root, under any name.
        inner = root / path.lstrip("/")
        folders = [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
        limiting.extend(ControlGroup(folder, not controllers) for folder in folders)
    return limiting


def cpu_quota(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """CPUs whose time this process may use at most, rounded up; None: no limit."""
    quotas = [quota for group in groups("cpu", proc, cgroup) if (quota := _quota(group)) is not None]
    return max(1, math.ceil(min(quotas))) if quotas else None


def _quota(group: ControlGroup) -> float | None:
    try:
        if group.is_v2:
            quota, period = (group.folder / "cpu.max").read_text().split()
        else:
            quota, period = ((group.folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or `max`
        return None


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
