"""Of the builds that the CPU can run the fastest is loaded; where there is none, one line says why and what to do."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from xxhash import _xxhash  # type: ignore[attr-defined]

from kvpool.worker_service.native.cpu import cpu_info, selection
from kvpool.worker_service.native.cpu.library import Layer, ModelSizes, open_library
from kvpool.worker_service.native.cpu.selection import BUILDS, NoNativeStep, load_step
from kvpool.worker_service.native.cpu.targets import TARGETS, X86_64_V4_AMX, X86_64_V4_BF16, BuildTarget

MACHINE = platform.machine()
FAST = BuildTarget("fast", MACHINE, frozenset({"simd", "wide"}), (), "", ("float32",))
SLOW = BuildTarget("slow", MACHINE, frozenset({"simd"}), (), "", ("float32",))
AMX = BuildTarget("tiles", MACHINE, frozenset({"simd", "amx_tile"}), (), "", ("float32",))
FOREIGN = BuildTarget("foreign", "vax", frozenset(), (), "")
DO = "install kvpool again, with a C compiler; in a clone, any `make` command compiles it."
TILE_PRODUCT = bytes.fromhex("c4e24a5cc4")
"""tdpbf16ps %tmm6, %tmm4, %tmm0: sums += inputs · weights."""

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


@pytest.fixture
def lines() -> list[str]:
    """Of progress."""
    return []


def refusal(lines: list[str]) -> str:
    with pytest.raises(NoNativeStep) as raised:
        load_step("float32", lines.append)
    assert lines == []
    return str(raised.value)


@pytest.mark.native
def test_the_fastest_is_loaded_and_the_log_names_it(folder: Path, lines: list[str]) -> None:
    library = load_step("float32", lines.append)
    assert library.path == folder / "fast-float32.so"
    assert library.describe().endswith(", float32, built for fast")
    assert lines == []


@pytest.mark.native
@pytest.mark.parametrize("cpus", [["simd"], ["simd wide", "other simd"]])
def test_only_instructions_that_every_cpu_has_are_used(
    cpus: list[str], folder: Path, set_flags: SetFlags, lines: list[str]
) -> None:
    """The threads of a step run on all of them. A file for other CPUs is not even opened: it is no library."""
    set_flags(*cpus)
    (folder / "fast-float32.so").write_text("no library")
    assert load_step("float32", lines.append).origin == "built for slow"
    assert lines == []


@pytest.mark.native
@pytest.mark.parametrize(
    ("flags", "refused", "origin", "said"),
    [
        ("simd amx_tile", None, "built for tiles", []),
        (
            "simd amx_tile",
            "Operation not permitted",
            "built for slow",
            ["Linux does not give AMX's tile registers to this process: Operation not permitted"],
        ),
    ],
)
def test_tile_registers_are_used_where_linux_gives_them(
    flags: str,
    refused: str | None,
    origin: str,
    said: list[str],
    folder: Path,
    set_flags: SetFlags,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux, or a container, may keep from a process what the CPU has."""
    set_flags(flags)
    monkeypatch.setattr(selection, "tile_refusal", lambda: refused)
    assert load_step("float32", lines.append).origin == origin
    assert lines == said


@pytest.mark.skipif(MACHINE != "x86_64", reason="a system call of x86-64")
def test_linux_is_asked_for_the_tile_registers() -> None:
    """A CPU without them has none to give; one with them may still be kept from this process."""
    refusal = selection.tile_refusal()
    assert (refusal is not None) or "amx_tile" in cpu_info.flags()
    assert refusal != os.strerror(0), "the reason is Linux's own"


@pytest.mark.native
def test_a_faster_one_that_was_not_built_is_named(folder: Path, lines: list[str]) -> None:
    """The compiler did not know the CPU."""
    (folder / "fast-float32.so").unlink()
    assert load_step("float32", lines.append).origin == "built for slow"
    assert lines == [f"The native step for fast was not built, the one for slow is slower: {DO}"]


@pytest.mark.native
def test_without_any_build_one_line_says_what_to_do(folder: Path, lines: list[str]) -> None:
    shutil.rmtree(folder)
    assert refusal(lines) == f"The native step was not built: {DO}"


@pytest.mark.native
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ((FOREIGN,), f"There is no native step for {MACHINE}."),
        ((FAST, SLOW), "The native step needs a CPU with simd, which this one lacks."),
    ],
    ids=["machine", "CPU"],
)
def test_a_machine_or_cpu_without_a_target_is_named(
    targets: tuple[BuildTarget, ...],
    expected: str,
    folder: Path,
    set_flags: SetFlags,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_flags("other")
    monkeypatch.setattr(selection, "TARGETS", targets)
    assert refusal(lines) == expected


@pytest.mark.native
def test_a_build_older_than_its_source_is_not_loaded(
    folder: Path, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout whose C was changed since. An installation has no source to compare with."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    monkeypatch.setattr(selection, "SOURCES", sources)
    (sources / "plan.h").touch()
    os.utime(sources / "plan.h", (1, 1))
    assert load_step("float32", lines.append).origin == "built for fast"
    (sources / "step.c").touch()
    os.utime(folder / "fast-float32.so", (2, 2))
    assert refusal(lines) == f"The native step was built before its source was changed: {DO}"


@pytest.mark.native
def test_what_is_no_step_is_not_loaded(folder: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "fast-float32.so"
    file.unlink()  # this process may have it loaded
    file.write_text("no library")
    assert refusal(lines).startswith(f"The native step cannot be loaded ({file}: ")
    file.unlink()
    shutil.copy(_xxhash.__file__, file)
    assert refusal(lines).startswith(f"The native step cannot be loaded ({file} lacks a function: ")


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
