"""The kinds of CPU that the step is compiled for, and how. setup.py reads this file alone, so it imports nothing of kvpool."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from collections.abc import Sequence
from typing import Literal, NamedTuple

NumberType = Literal["float32", "bfloat16"]

FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
    "-pthread",
)
"""Options of every build. -ffast-math is never among them: NaN must stay NaN."""


class BuildTarget(NamedTuple):
    """A kind of CPU."""

    name: str
    """Shown to users."""
    machine: str
    """The machine's name as platform.machine() gives it."""
    cpu_flags: frozenset[str]
    """What a build for it may use, as cpu_info.flags() names it."""
    options: tuple[str, ...]
    """Options that gcc and clang take for this CPU."""
    zig_cpu: str
    number_types: tuple[NumberType, ...] = ("float32", "bfloat16")

    @property
    def has_tiles(self) -> bool:
        """Whether it uses AMX's tile registers, which Linux gives only to a process that asks for them."""
        return "amx_tile" in self.cpu_flags

    def file_name(self, number_type: NumberType) -> str:
        """Return the name of the build's file."""
        return f"{self.name}-{number_type}.so"


X86_64_V3 = BuildTarget(
    "x86-64-v3",
    "x86_64",
    frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("-march=x86-64-v3",),
    "x86_64_v3",
)
X86_64_V4 = BuildTarget(
    "x86-64-v4",
    "x86_64",
    X86_64_V3.cpu_flags | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    ("-march=x86-64-v4",),
    "x86_64_v4",
)
X86_64_V4_BF16 = BuildTarget(
    "x86-64-v4+bf16",
    "x86_64",
    X86_64_V4.cpu_flags | {"avx512_bf16", "avx512_vnni"},  # every CPU with the one has the other, which int8 needs
    (*X86_64_V4.options, "-mavx512bf16", "-mavx512vnni"),
    "x86_64_v4+avx512bf16+avx512vnni",
)
X86_64_V4_AMX = BuildTarget(
    "x86-64-v4+amx",
    "x86_64",
    X86_64_V4_BF16.cpu_flags | {"amx_tile", "amx_bf16"},
    (*X86_64_V4_BF16.options, "-mamx-tile", "-mamx-bf16"),
    f"{X86_64_V4_BF16.zig_cpu}+amx_tile+amx_bf16",
    ("bfloat16",),
)
AARCH64 = BuildTarget("aarch64", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), "generic")
AARCH64_BF16 = BuildTarget(
    "aarch64+bf16",
    "aarch64",
    # Those of the first version of the architecture for which gcc knows bf16, and every CPU with bf16 has.
    frozenset({"asimd", "asimdrdm", "atomics", "bf16", "crc32"}),
    ("-march=armv8.2-a+bf16",),
    "generic+bf16",
    ("bfloat16",),
)
TARGETS = (X86_64_V4_AMX, X86_64_V4_BF16, X86_64_V4, X86_64_V3, AARCH64_BF16, AARCH64)
"""All targets; those of one machine are in order, the fastest first."""


def find_compiler() -> list[str] | None:
    """Its command: $CC if it is set, else cc, gcc, clang, or that of the Python package ziglang; None if there is none."""
    if given := os.environ.get("CC"):
        return shlex.split(given)
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    spec = importlib.util.find_spec("ziglang")
    folders = (spec and spec.submodule_search_locations) or ()
    return [os.path.join(folders[0], "zig"), "cc"] if folders else None


def is_zig(compiler: Sequence[str]) -> bool:
    """Whether this command runs zig, which spells CPUs in its own way."""
    return os.path.basename(compiler[0]) == "zig" or "ziglang" in compiler  # python -m ziglang cc


def flags(compiler: Sequence[str], target: BuildTarget, number_type: NumberType) -> list[str]:
    """All of a compiler's arguments but files and libraries."""
    cpu = (f"-mcpu={target.zig_cpu}", "-s") if is_zig(compiler) else target.options
    return [*FLAGS, *cpu, f"-DBFLOAT16={int(number_type == 'bfloat16')}"]
