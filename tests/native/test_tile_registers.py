"""The step for CPUs with AMX is compiled here, whatever this CPU is, and does not run where Linux gives no tile registers."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu.compiler import compile_step, find_compilers
from kvpool.worker_service.native.cpu.trial import why_it_does_not_run
from scripts.native_builds import X86_64_V4_AMX

TILE_PRODUCT = bytes.fromhex("c4e24a5cc4")
"""tdpbf16ps %tmm6, %tmm4, %tmm0: sums += inputs · weights."""
OF_GCC = ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")


@pytest.mark.compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="this machine's compiler does not know AMX")
def test_this_machines_compiler_compiles_for_amx(tmp_path: Path) -> None:
    """Unoptimized, to save time. A CPU without AVX-512 ends the trial before it asks for the registers."""
    compiler, file = find_compilers()[0], tmp_path / "step.so"
    options = X86_64_V4_AMX.options if compiler.is_zig else OF_GCC
    compile_step(compiler, "bfloat16", file, (*options, "-O0"))
    assert TILE_PRODUCT in file.read_bytes()
    problem = why_it_does_not_run(file)
    assert (
        problem is None
        or "Linux does not give AMX's tile registers to this process: " in problem
        or "signal" in problem
    )
