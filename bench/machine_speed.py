"""Measures how fast this machine reads memory and multiplies, with loops in C: what bounds every engine on it.

Compiled like the native step that runs here, so the products are those of its vectors: with AMX a machine can do more.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvpool.worker_service.native.cpu.selection import SOURCES, NoNativeStep, fitting_targets
from kvpool.worker_service.native.cpu.targets import NumberType, find_compiler, flags

SOURCE: Final = Path(__file__).with_name("machine_speed.c")
_COMPILE_LIMIT_S: Final = 60.0
_BUFFER_BYTES: Final = 128 << 20
"""For each thread: more than its share of the caches."""
_TURNS: Final = 1_000_000
_RUNS: Final = 5


class CannotMeasure(RuntimeError):
    """There is no C compiler here that can build it. The message is one line."""


class MachineSpeed(NamedTuple):
    """What the threads of one process reach together, at best."""

    read_bytes_per_s: float
    flop_per_s: float
    """A multiplication and an addition counted as two."""

    def floor_s(self, num_bytes: float, num_flop: float) -> float:
        """The least time of work that reads and multiplies this much."""
        return max(num_bytes / self.read_bytes_per_s, num_flop / self.flop_per_s)

    def at_best(self, other: MachineSpeed | None) -> MachineSpeed:
        """The higher speeds of two measurements: other programs can only lower them."""
        return self if other is None else MachineSpeed(*map(max, self, other))

    def __str__(self) -> str:
        return f"reads {self.read_bytes_per_s / 1e9:.1f} GB/s, multiplies {self.flop_per_s / 1e9:.0f} GFLOP/s"


def measure_speed(number_type: NumberType, num_threads: int) -> MachineSpeed:
    """Takes about a second, and 128 MiB for each thread. Raises CannotMeasure."""
    functions = _compiled(number_type)
    buffers = [
        bytearray(b"\1") * _BUFFER_BYTES for _ in range(num_threads)
    ]  # written, or all pages were one page of zeros
    places = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in buffers]
    with ThreadPoolExecutor(num_threads) as threads:

        def best_s(work: Callable[[int], object]) -> float:
            """Least time of `work` in all threads at once. ctypes releases the GIL."""
            found = []
            for _ in range(_RUNS):
                began = time.perf_counter()
                list(threads.map(work, places))
                found.append(time.perf_counter() - began)
            return min(found)

        read_s = best_s(lambda place: functions.read_bytes(place, _BUFFER_BYTES))
        multiply_s = best_s(lambda _: functions.multiply(_TURNS))
    num_flop = _TURNS * functions.operations_per_turn()
    return MachineSpeed(num_threads * _BUFFER_BYTES / read_s, num_threads * num_flop / multiply_s)


def _compiled(number_type: NumberType) -> Any:
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        library = Path(folder) / "machine_speed.so"
        if problem := _problem(number_type, library):
            raise CannotMeasure(f"{SOURCE} cannot be compiled: {problem}. Set CC to another C compiler.")
        functions = ctypes.CDLL(str(library))
    functions.read_bytes.argtypes, functions.read_bytes.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_int64
    functions.multiply.argtypes, functions.multiply.restype = (ctypes.c_int64,), ctypes.c_float
    functions.operations_per_turn.restype = ctypes.c_int64
    return functions


def _problem(number_type: NumberType, library: Path) -> str | None:
    """Compile it. Returns why that fails."""
    if (compiler := find_compiler()) is None:
        return "there is no C compiler"
    try:
        options = flags(compiler, fitting_targets(number_type)[0], number_type)
        command = [*compiler, *options, "-I", str(SOURCES), str(SOURCE), "-o", str(library), "-lm"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_COMPILE_LIMIT_S, check=False
        )
    except (NoNativeStep, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else f"{compiler[0]}: {done.stdout.strip() or 'no output'}"
