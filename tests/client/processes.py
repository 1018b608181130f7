"""Looks at other processes through /proc."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for does not."""
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def state(pid: int) -> str:
    """R runs, S sleeps, T is stopped, Z has ended, …"""
    return _stat(pid)[0]


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def descendants(pid: int) -> list[int]:
    """Child processes, in the order in which they were started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_ticks(pid: int) -> int:
    return sum(map(int, _stat(pid)[11:13]))


def _stat(pid: int) -> list[str]:
    """The fields after the name of the program, which may have any characters."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
