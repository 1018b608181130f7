"""The kernel's control groups of this process, which limit a container or service."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

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
