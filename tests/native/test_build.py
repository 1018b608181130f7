"""setup.py compiles the step for every kind of CPU; of the builds that this CPU can run the fastest is loaded."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from xxhash import _xxhash  # type: ignore[attr-defined]

from kvpool.worker_service.native.cpu import cpu_info, selection
from kvpool.worker_service.native.cpu.library import Layer, ModelSizes, open_library
from kvpool.worker_service.native.cpu.selection import BUILDS, SOURCES, NoNativeStep, load_step
from kvpool.worker_service.native.cpu.targets import (
    AARCH64,
    AARCH64_BF16,
    FLAGS,
    TARGETS,
    X86_64_V3,
    X86_64_V4_AMX,
    X86_64_V4_BF16,
    BuildTarget,
    flags,
)

ROOT = Path(__file__).parents[2]
STEP = "worker_service/native/cpu"
WANTED = {
    one.file_name(kind): (one, kind)
    for one in TARGETS
    for kind in one.number_types
    if one.machine == platform.machine()
}
TILE_PRODUCT = bytes.fromhex("c4e24a5cc4")
"""tdpbf16ps %tmm6, %tmm4, %tmm0: sums += inputs · weights."""
COST = "A CPU with no other build that it can run computes with torch: steps take two to six times as long."


class Checkout:
    """A copy of what setup.py needs, with a compiler that writes its arguments into the file that it is to make."""

    def __init__(self, folder: Path) -> None:
        self.root, self.cc, self.path = folder / "kvpool", folder / "fake", folder / "bin"
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            self.root.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, self.root)
        shutil.copytree(ROOT / STEP, self.root / STEP, ignore=shutil.ignore_patterns("builds", "__pycache__"))
        self.path.mkdir()
        (self.path / "ziglang.py").touch()  # before the package, if this machine has it
        self.write_compiler("true")

    def write_compiler(self, first: str) -> None:
        """`first`: a command of the shell that it runs first."""
        self.cc.write_text(
            f'#!/bin/sh\narguments="$*"\n{first}\nwhile [ "$1" != -o ]; do shift; done\necho "$arguments" > "$2"\n'
        )
        self.cc.chmod(0o755)

    def build(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """setup.py build_ext, without $CC but the one that is given."""
        environment = {key: value for key, value in os.environ.items() if key not in ("CC", "KVPOOL_NATIVE")}
        environment |= {"PYTHONPATH": str(self.path), **variables}
        command = [sys.executable, "setup.py", "--quiet", "build_ext", *(arguments or ("--inplace",))]
        return subprocess.run(
            command, cwd=self.root, env=environment, text=True, capture_output=True, timeout=100, check=False
        )

    @property
    def built(self) -> dict[str, str]:
        """The compiler's arguments for each file."""
        return {file.name: file.read_text() for file in (self.root / STEP / "builds").glob("*")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if not WANTED:
        pytest.skip("the step is not built for this kind of machine")
    return Checkout(tmp_path)


def test_every_kind_of_cpu_and_number_type_has_a_build_with_its_flags(checkout: Checkout) -> None:
    """Ours alone: Python's own, which a distribution chooses, could change what the step computes."""
    assert checkout.build(CC=str(checkout.cc), CFLAGS="-ffast-math").returncode == 0
    assert checkout.built.keys() == WANTED.keys()
    for name, (target, kind) in WANTED.items():
        *given, source, option, _, library = checkout.built[name].split()
        assert given == [*FLAGS, *target.options, f"-DBFLOAT16={int(kind == 'bfloat16')}"]
        assert [source, option, library] == [f"{STEP}/csrc/step.c", "-o", "-lm"]


def test_only_what_is_older_than_its_source_is_compiled_again(checkout: Checkout) -> None:
    checkout.build(CC=str(checkout.cc))
    checkout.write_compiler('arguments="again"')
    assert checkout.build(CC=str(checkout.cc)).returncode == 0
    assert "again\n" not in checkout.built.values()
    os.utime(checkout.root / STEP / "csrc/plan.h")
    checkout.build(CC=str(checkout.cc))
    assert set(checkout.built.values()) == {"again\n"}


@pytest.mark.parametrize("is_required", [False, True])
def test_without_a_compiler_nothing_is_built(is_required: bool, checkout: Checkout) -> None:
    required = {"KVPOOL_NATIVE": "required"} if is_required else {}
    done = checkout.build(PATH=str(checkout.path), **required)
    assert f"there is no C compiler: install gcc, or set CC to one's command. {COST}" in done.stderr
    assert (done.returncode != 0) == is_required
    assert checkout.built == {}


@pytest.mark.parametrize("is_required", [False, True])
def test_what_a_compiler_does_not_know_is_left_out_and_named(is_required: bool, checkout: Checkout) -> None:
    """As gcc of 2020 knows no x86-64-v3. The rest is built."""
    (first, _), *_ = WANTED.values()
    checkout.write_compiler(f'case "$*" in *{first.options[-1]}\\ *) echo unknown >&2; exit 1;; esac')
    required = {"KVPOOL_NATIVE": "required"} if is_required else {}
    done = checkout.build(CC=str(checkout.cc), **required)
    assert "unknown" in done.stderr
    assert (done.returncode != 0) == is_required
    if not is_required:
        lacking = [name for name in WANTED if name not in checkout.built]
        assert lacking == [first.file_name(kind) for kind in first.number_types]
        names = ", ".join(name.removesuffix(".so") for name in lacking)
        assert f"the native step was not built for {names}. {COST}" in done.stderr


def test_zig_is_told_the_cpu_in_its_own_words(checkout: Checkout) -> None:
    zig = checkout.cc.rename(checkout.cc.with_name("zig"))
    assert checkout.build(CC=f"{zig} cc").returncode == 0
    for name, (target, _) in WANTED.items():
        assert f" -mcpu={target.zig_cpu} -s " in checkout.built[name]
        assert "-march" not in checkout.built[name]


@pytest.mark.zig
@pytest.mark.parametrize(
    ("target", "elf_machine", "found"),
    [
        (X86_64_V3, b"\x3e\0", b""),
        (X86_64_V4_AMX, b"\x3e\0", TILE_PRODUCT),
        (AARCH64, b"\xb7\0", b""),
        (AARCH64_BF16, b"\xb7\0", b""),
    ],
    ids=lambda given: given.name if isinstance(given, BuildTarget) else "",
)
def test_zig_compiles_for_other_machines(target: BuildTarget, elf_machine: bytes, found: bytes, tmp_path: Path) -> None:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{target.machine}-linux-gnu.2.17"]
    output = tmp_path / "step.so"
    options = [*flags(zig, target, "bfloat16"), "-O1"]
    subprocess.run([*zig, *options, SOURCES / "step.c", "-o", output, "-lm"], check=True)
    assert output.read_bytes()[18:20] == elf_machine  # e_machine of ELF
    assert found in output.read_bytes()


# -- the fastest is loaded; where there is none, one line says why and what to do


MACHINE = platform.machine()
FAST = BuildTarget("fast", MACHINE, frozenset({"simd", "wide"}), (), "", ("float32",))
SLOW = BuildTarget("slow", MACHINE, frozenset({"simd"}), (), "", ("float32",))
AMX = BuildTarget("tiles", MACHINE, frozenset({"simd", "amx_tile"}), (), "", ("float32",))
FOREIGN = BuildTarget("foreign", "vax", frozenset(), (), "")
DO = "install kvpool again, with a C compiler; in a clone, any `make` command compiles it."

SetFlags = Callable[..., None]


@pytest.fixture
def set_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetFlags:
    """Give this machine one CPU for each string of flags."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_info, "CPU_INFO", path)

    def set_flags(*cpus: str) -> None:
        path.write_text("".join(f"model\t\t: 1\nflags\t\t: {flags}\n\n" for flags in cpus))

    return set_flags


@pytest.fixture(scope="module")
def real_file() -> Path:
    """What this machine's workers load."""
    return load_step("float32", print).path


@pytest.fixture
def folder(real_file: Path, set_flags: SetFlags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds of an installation. The CPU can run two of them."""
    path = tmp_path / "builds"
    path.mkdir()
    for target in (FOREIGN, FAST, SLOW, AMX):
        shutil.copy(real_file, path / target.file_name("float32"))
    set_flags("simd wide other")
    monkeypatch.setattr(selection, "BUILDS", path)
    monkeypatch.setattr(selection, "TARGETS", (FOREIGN, AMX, FAST, SLOW))
    return path


def loaded() -> list[str]:
    """The lines of progress, and what is loaded, or why nothing is."""
    lines: list[str] = []
    try:
        lines.append(load_step("float32", lines.append).origin)
    except NoNativeStep as refusal:
        lines.append(str(refusal))
    return lines


@pytest.mark.native
@pytest.mark.parametrize(
    ("cpus", "changes", "expected"),
    [
        (["simd wide"], {}, ["built for fast"]),
        (["simd"], {}, ["built for slow"]),
        (["simd wide", "other simd"], {}, ["built for slow"]),  # the threads of a step run on all of them
        (["simd amx_tile"], {"tile_refusal": lambda: None}, ["built for tiles"]),
        # Linux, or a container, may keep from a process what the CPU has.
        (
            ["simd amx_tile"],
            {"tile_refusal": lambda: "not permitted"},
            ["Linux does not give AMX's tile registers to this process: not permitted", "built for slow"],
        ),
        (["other"], {}, ["The native step needs a CPU with simd, which this one lacks."]),
        (["simd"], {"TARGETS": (FOREIGN,)}, [f"There is no native step for {MACHINE}."]),
    ],
    ids=["fast", "slow", "all cpus", "tiles", "no tiles", "other flags", "other machine"],
)
def test_the_fastest_that_every_cpu_can_run_is_loaded(
    cpus: list[str],
    changes: dict[str, Any],
    expected: list[str],
    folder: Path,
    set_flags: SetFlags,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file for other CPUs is not even opened: it is no library."""
    set_flags(*cpus)
    for name, value in changes.items():
        monkeypatch.setattr(selection, name, value)
    if expected != ["built for fast"]:
        (folder / "fast-float32.so").write_text("no library")
    assert loaded() == expected


@pytest.mark.skipif(MACHINE != "x86_64", reason="a system call of x86-64")
def test_linux_is_asked_for_the_tile_registers() -> None:
    """A CPU without them has none to give; one with them may still be kept from this process."""
    refusal = selection.tile_refusal()
    assert (refusal is not None) or "amx_tile" in cpu_info.flags()
    assert refusal != os.strerror(0), "the reason is Linux's own"


@pytest.mark.native
def test_what_was_not_built_is_named_with_what_to_do(folder: Path) -> None:
    assert load_step("float32", print).describe().endswith(", float32, built for fast")
    (folder / "fast-float32.so").unlink()
    assert loaded() == [f"The native step for fast was not built, the one for slow is slower: {DO}", "built for slow"]
    shutil.rmtree(folder)
    assert loaded() == [f"The native step was not built: {DO}"]


@pytest.mark.native
def test_a_build_older_than_its_source_is_not_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout whose C was changed since. An installation has no source to compare with."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    monkeypatch.setattr(selection, "SOURCES", sources)
    (sources / "plan.h").touch()
    os.utime(sources / "plan.h", (1, 1))
    assert loaded() == ["built for fast"]
    (sources / "step.c").touch()
    os.utime(folder / "fast-float32.so", (2, 2))
    assert loaded() == [f"The native step was built before its source was changed: {DO}"]


@pytest.mark.native
def test_what_is_no_step_is_not_loaded(folder: Path) -> None:
    file = folder / "fast-float32.so"
    file.write_text("no library")
    assert loaded()[0].startswith(f"The native step cannot be loaded ({file}: ")
    file.unlink()
    shutil.copy(_xxhash.__file__, file)
    assert loaded()[0].startswith(f"The native step cannot be loaded ({file} lacks a function: ")


def test_of_two_targets_the_one_that_needs_more_comes_first() -> None:
    """A worker takes the first one that its CPU can run."""
    for index, target in enumerate(TARGETS):
        earlier = [one for one in TARGETS[:index] if one.machine == target.machine]
        assert not any(one.cpu_flags < target.cpu_flags for one in earlier)


@pytest.mark.native
@pytest.mark.skipif(
    not X86_64_V4_BF16.cpu_flags <= cpu_info.flags(), reason="the step for AMX uses AVX-512 before it asks for AMX"
)
def test_the_step_for_amx_asks_linux_itself() -> None:
    """It is built whatever this CPU is, and where Linux gives no tile registers it computes nothing."""
    file = BUILDS / X86_64_V4_AMX.file_name("bfloat16")
    assert TILE_PRODUCT in file.read_bytes()
    functions = open_library(file).functions
    model = functions.kvpool_open(ctypes.byref(ModelSizes()), (Layer * 0)(), 1)
    if model:
        assert "amx_tile" in cpu_info.flags()
        functions.kvpool_close(model)
    else:
        assert functions.kvpool_problem().startswith(b"Linux does not give AMX's tile registers to this process: ")


# -- what /proc/cpuinfo says of matrix units


X86, ARM = "flags\t\t: fpu avx2 avx512f avx512_bf16", "Features\t: fp asimd"


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        pytest.param([f"{X86} amx_bf16 amx_tile"] * 2, "amx_bf16", id="AMX"),
        pytest.param([f"{X86} amx_int8 amx_tile"] * 2, None, id="AMX for integers"),
        pytest.param([f"{X86} amx_bf16", X86], None, id="AMX in one of two kinds of CPU"),
        pytest.param([f"{ARM} i8mm bf16"], "bf16", id="Arm with BFMMLA"),
        pytest.param([f"{ARM} i8mm"], None, id="Arm without"),
    ],
)
def test_a_matrix_unit_for_bfloat16(
    cpus: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vectors alone, such as avx512_bf16, are none; and there is none for float32."""
    file = tmp_path / "cpuinfo"
    file.write_text("".join(f"processor\t: {number}\n{line}\n\n" for number, line in enumerate(cpus)))
    monkeypatch.setattr(cpu_info, "CPU_INFO", file)
    assert cpu_info.matrix_unit("bfloat16") == expected
    assert cpu_info.matrix_unit("float32") is None
