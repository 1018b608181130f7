"""The CPUs of this machine, as Linux lists them."""

from __future__ import annotations

from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
_OF_KIND = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU ")
_OF_FLAGS = ("flags", "Features")
"""On x86, and on aarch64."""
_MATRIX_UNITS = {"bfloat16": ("amx_bf16", "bf16")}
"""CPU flags of matrix units by number type: AMX on x86, BFMMLA on aarch64 (x86 has no flag bf16)."""


def identity() -> list[str]:
    """Lines that identify the kinds of CPU here and their instructions."""
    return sorted({line for line in _lines() if line.startswith(_OF_KIND)})


def flags() -> frozenset[str]:
    """Names of the instructions that all CPUs here have, as in /proc/cpuinfo; empty if there is no such file."""
    of_each = [set(line.partition(":")[2].split()) for line in _lines() if line.startswith(_OF_FLAGS)]
    return frozenset(set.intersection(*of_each)) if of_each else frozenset()


def matrix_unit(number_type: str) -> str | None:
    """The flag of the instructions with which all CPUs here multiply matrices of this type; None: they have none."""
    found = flags()
    return next((flag for flag in _MATRIX_UNITS.get(number_type, ()) if flag in found), None)


def _lines() -> list[str]:
    try:
        return CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        return []
