"""python -m scripts.native_builds [FOLDER]: compile the native step for other CPUs than this one, for an image or a wheel.

Needs the Python package ziglang, which compiles for every CPU. FOLDER becomes that of
kvpool.worker_service.native.cpu.prebuilt, and is that one if it is not given. Each file that this CPU can run is tried.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvpool.worker_service.native.cpu import cpu_info
from kvpool.worker_service.native.cpu.compiler import (
    Compiler,
    NoNativeLibrary,
    NumberType,
    compile_step,
    find_zig,
    source_digest,
)
from kvpool.worker_service.native.cpu.prebuilt import FOLDER, MANIFEST, Build, Manifest, write_manifest
from kvpool.worker_service.native.cpu.trial import why_it_does_not_run

_LIMIT_S = 900.0
"""Of one file: nothing waits for it, and the machine may have much else to build."""


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of CPU."""

    name: str
    machine: str
    """As platform.machine() names it."""
    cpu_flags: frozenset[str]
    """As cpu_info.flags() names them."""
    options: tuple[str, ...]
    """Of the compiler."""
    number_types: tuple[NumberType, ...] = ("float32", "bfloat16")


def _zig(triple: str, cpu: str) -> tuple[str, ...]:
    # The C library of 2014, which every newer one can take the place of; -s: without symbols for debuggers.
    return ("-target", f"{triple}-linux-gnu.2.17", f"-mcpu={cpu}", "-s")


X86_64_V3 = Target(
    "x86-64-v3",
    "x86_64",
    frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    _zig("x86_64", "x86_64_v3"),
)
X86_64_V4 = Target(
    "x86-64-v4",
    "x86_64",
    X86_64_V3.cpu_flags | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    _zig("x86_64", "x86_64_v4"),
)
X86_64_V4_BF16 = Target(
    "x86-64-v4+bf16",
    "x86_64",
    X86_64_V4.cpu_flags | {"avx512_bf16", "avx512_vnni"},  # every CPU with the one has the other, which int8 needs
    _zig("x86_64", "x86_64_v4+avx512bf16+avx512vnni"),
)
X86_64_V4_AMX = Target(
    "x86-64-v4+amx",
    "x86_64",
    X86_64_V4_BF16.cpu_flags | {"amx_tile", "amx_bf16"},
    _zig("x86_64", "x86_64_v4+avx512bf16+avx512vnni+amx_tile+amx_bf16"),
    ("bfloat16",),
)
AARCH64 = Target("aarch64", "aarch64", frozenset({"asimd"}), _zig("aarch64", "generic"))
AARCH64_BF16 = Target(
    "aarch64+bf16", "aarch64", frozenset({"asimd", "bf16"}), _zig("aarch64", "generic+bf16"), ("bfloat16",)
)
TARGETS = (X86_64_V4_AMX, X86_64_V4_BF16, X86_64_V4, X86_64_V3, AARCH64_BF16, AARCH64)
"""Of each machine the fastest first."""


def build(compiler: Compiler, targets: Sequence[Target], folder: Path) -> Manifest:
    """Fill the folder. Raises NoNativeLibrary if a file cannot be compiled, or does not run on this CPU although it should."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    wanted = [(target, number_type) for target in targets for number_type in target.number_types]
    with (
        tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as work,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        done = list(pool.map(lambda one: _build_one(compiler, one[0], one[1], Path(work)), wanted))
        for old in folder.glob("*.so"):
            old.unlink()
        for one in done:
            shutil.move(Path(work) / one.file, folder)
    manifest = Manifest(source_digest(), compiler.name, tuple(done))
    write_manifest(folder, manifest)
    return manifest


def _build_one(compiler: Compiler, target: Target, number_type: NumberType, work: Path) -> Build:
    file = work / f"{target.name}-{number_type}.so"
    compile_step(compiler, number_type, file, target.options, _LIMIT_S)
    runs_here = target.machine == platform.machine() and target.cpu_flags <= cpu_info.flags()
    if runs_here and (problem := why_it_does_not_run(file)):
        raise NoNativeLibrary(f"{file.name}, compiled by {compiler.name}, does not run on this CPU: {problem}.")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Build(file.name, digest, number_type, target.name, target.machine, tuple(sorted(target.cpu_flags)))


def main() -> None:
    """Of the command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.native_builds", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"(default {FOLDER})")
    folder = parser.parse_args().folder
    if (zig := find_zig()) is None:
        sys.exit("The Python package ziglang is needed: pip install ziglang")
    try:
        manifest = build(zig, TARGETS, folder)
    except NoNativeLibrary as error:
        sys.exit(str(error))
    for one in manifest.builds:
        print(f"{(folder / one.file).stat().st_size:9,} bytes  {folder / one.file}")


if __name__ == "__main__":
    main()
