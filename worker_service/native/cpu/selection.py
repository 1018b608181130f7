"""Which build of the step this process loads: of those that its CPU can run, the fastest that is there."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from . import cpu_info
from .library import Library, LibraryMismatch, open_library
from .targets import TARGETS, BuildTarget, NumberType

BUILDS = Path(__file__).parent / "builds"
"""The folder into which setup.py puts the builds."""
SOURCES = Path(__file__).parent / "csrc"
"""Only in a checkout."""
_BUILD = "install kvpool again, with a C compiler; in a clone, any `make` command compiles it"
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18
"""The system call of x86-64, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA."""


class NoNativeStep(RuntimeError):
    """There is no step that can run here. The message is one line: why, and what to do."""


def load_step(number_type: NumberType, progress: Callable[[str], None]) -> Library:
    """The step for this number type. The CPU's flags decide before a file is opened, so that no instruction is executed that
    the CPU lacks. progress gets a line if there could be a faster one. Raises NoNativeStep."""
    missing: list[str] = []
    for target in fitting_targets(number_type):
        file = BUILDS / target.file_name(number_type)
        if not file.exists():
            missing.append(target.name)
            continue
        if target.has_tiles and (why := tile_refusal()):
            progress(f"Linux does not give AMX's tile registers to this process: {why}")
            continue
        if missing:
            progress(f"The native step for {missing[0]} was not built, the one for {target.name} is slower: {_BUILD}.")
        return replace(_open(file), origin=f"built for {target.name}")
    raise NoNativeStep(f"The native step was not built: {_BUILD}.")


def fitting_targets(number_type: NumberType) -> list[BuildTarget]:
    """Those whose builds every CPU here can run, since the threads of a step run on all of them; the fastest first. Raises
    NoNativeStep if there is none."""
    machine, flags = platform.machine(), cpu_info.flags()
    of_machine = [one for one in TARGETS if one.machine == machine and number_type in one.number_types]
    if not of_machine:
        raise NoNativeStep(f"There is no native step for {machine}.")
    if fitting := [target for target in of_machine if target.cpu_flags <= flags]:
        return fitting
    lacking = ", ".join(sorted(of_machine[-1].cpu_flags - flags))
    raise NoNativeStep(f"The native step needs a CPU with {lacking}, which this one lacks.")


def _open(file: Path) -> Library:
    """Raises NoNativeStep."""
    newest = max((source.stat().st_mtime for source in SOURCES.glob("*.[ch]")), default=0.0)
    if newest > file.stat().st_mtime:
        raise NoNativeStep(f"The native step was built before its source was changed: {_BUILD}.")
    try:
        return open_library(file)
    except (OSError, LibraryMismatch) as error:
        raise NoNativeStep(f"The native step cannot be loaded ({error}): {_BUILD}.") from error


def tile_refusal() -> str | None:
    """Ask Linux for AMX's tile registers, which it gives to a process once for all its threads. None, or its reason."""
    if ctypes.CDLL(None, use_errno=True).syscall(_ARCH_PRCTL, _REQUEST, _TILE_DATA) == 0:
        return None
    return os.strerror(ctypes.get_errno())
