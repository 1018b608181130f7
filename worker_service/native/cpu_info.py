"""The CPUs of this machine, as Linux lists them."""

from __future__ import annotations

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_OF_KIND = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU ")
_OF_FLAGS = ("flags", "Features")
"""On x86, and on aarch64."""


def identity() -> list[str]:
    """Lines that identify the kinds of CPU here and their instructions."""
    return sorted({line for line in _lines() if line.startswith(_OF_KIND)})


def flags() -> frozenset[str]:
    """Names of the instructions that all CPUs here have, as in /proc/cpuinfo; empty if there is no such file."""
    of_each = [set(line.partition(":")[2].split()) for line in _lines() if line.startswith(_OF_FLAGS)]
    return frozenset(set.intersection(*of_each)) if of_each else frozenset()


def _lines() -> list[str]:
    try:
        return CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return []
