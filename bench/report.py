"""Shared by all benchmarks: the command line, series of timings, progress on stderr, tables, and facts of the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table

STDOUT: Final = "-"
"""The file of `--json` without a name."""
_TABLE_WIDTH: Final = 170
"""In columns, if stdout is not a terminal."""


def command_line(
    doc: str | None, *, runs: int | None, of: str = "interleaved repetitions", json_file: bool = False
) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: --json, and --runs with the default `runs`, unless that is None. With
    `json_file` --json may name a file; see report_as."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if runs is not None:
        parser.add_argument("--runs", type=_at_least_one, default=runs, help=f"{of} (default {runs})")
    if json_file:
        parser.add_argument(
            "--json", nargs="?", const=STDOUT, metavar="FILE",
            help="write one JSON object to FILE and the tables to stdout; without FILE, print the object instead of the tables",
        )  # fmt: skip
    else:
        parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    return parser


def report_as(target: str | None, found: Mapping[str, Any], show: Callable[[], None]) -> None:
    """Print the tables with `show`, or write the object, or both: as --json FILE asks for."""
    if target == STDOUT:
        print(json.dumps(found))
        return
    show()
    if target is not None:
        Path(target).write_text(json.dumps(found, indent=1) + "\n")
        progress(f"wrote {target}")


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def print_table(table: Table) -> None:
    """Print a rich table on stdout; in a pipe, with a fixed width."""
    from rich.console import Console  # not at the top: this module also runs in a peer's environment without rich

    Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(table)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def progress(text: str) -> None:
    """Print a progress line on stderr; stdout is for the result."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Series:
    """Repetitions of one measurement, in seconds."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle repetition."""
        return statistics.median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"name": self.name, "median_s": self.median, "seconds": self.seconds}

    @property
    def spread(self) -> str:
        """Median, least and most."""
        return f"{_time(self.median)} ({_time(min(self.seconds))} to {_time(max(self.seconds))})"

    def __str__(self) -> str:
        return f"{self.spread[:-1]}, {len(self.seconds)} runs)"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster `ours` was than `peer`, in interleaved pairs of repetitions: median, least and most."""

    ours: Series
    peer: Series

    @property
    def median(self) -> float:
        """Above 1: ours is faster."""
        return statistics.median(self.pairs)

    @property
    def pairs(self) -> list[float]:
        """One ratio per repetition."""
        return [peer / ours for ours, peer in zip(self.ours.seconds, self.peer.seconds, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"median": self.median, "least": min(self.pairs), "most": max(self.pairs)}

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({min(self.pairs):.2f}x to {max(self.pairs):.2f}x)"


def facts(*packages: str) -> dict[str, Any]:
    """Date, kind of machine, load and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "cpu_features": _cpu_features(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_features() -> list[str]:
    """Features that determine the speed of bfloat16 on a CPU."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        return []
    return [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
