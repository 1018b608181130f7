"""How much memory this process can have on a CPU: the machine's, or less where a container or a service has a limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


class CPUMemory(NamedTuple):
    """In bytes."""

    total: int
    available: int
    """Can still be allocated without swapping: files that the kernel keeps in memory give way."""


class _Names(NamedTuple):
    """Files of a control group, and what of its use the kernel takes back at once."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def read_cpu_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> CPUMemory:
    """What the kernel says now. Raises ModelError where it says nothing."""
    total, available = _machine(proc)
    for folder, names in _groups(proc, cgroup):
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
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    if len(found) != 2:
        raise ModelError(f"Cannot tell the memory of this machine: {proc / 'meminfo'} does not name it.")
    return CPUMemory(int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024)


def _groups(proc: Path, cgroup: Path) -> list[tuple[Path, _Names]]:
    """The control groups that this process is in, up to the root; those that are not there are harmless."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups: list[tuple[Path, _Names]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroup / "memory", _V1) if controllers else (cgroup, _V2)
        # A container sees its own group as the root, whatever the name that it is told.
        inner = root / path.lstrip("/")
        folders = [folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents]
        groups.extend((folder, names) for folder in folders)
    return groups


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
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
