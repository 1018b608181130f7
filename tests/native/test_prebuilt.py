"""The fastest prebuilt step that this CPU can run is loaded; where there is none, or it is damaged, a compiled one."""

from __future__ import annotations

import hashlib
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpool.worker_service.native.cpu import compiler, cpu_info, prebuilt
from kvpool.worker_service.native.cpu.compiler import Compiler, NoNativeLibrary, find_zig
from kvpool.worker_service.native.cpu.prebuilt import MANIFEST, Build, read_manifest, write_manifest
from kvpool.worker_service.native.cpu.selection import select_library
from scripts.native_builds import AARCH64, TARGETS, X86_64_V3, X86_64_V4_AMX, Target, build
from tests.native.fake_compiler import FakeCompiler
from tests.native.test_tile_registers import TILE_PRODUCT

MACHINE = platform.machine()
FAST = Target("fast", MACHINE, frozenset({"simd", "wide"}), (), ("float32",))
SLOW = Target("slow", MACHINE, frozenset({"simd"}), (), ("float32",))
FOREIGN = Target("foreign", "vax", frozenset(), (), ("float32",))

SetFlags = Callable[..., None]


@pytest.fixture(scope="module")
def packaged(real_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prebuilt steps, as a release has them."""
    place = tmp_path_factory.mktemp("release")
    program = FakeCompiler(place / "packager", f'cp {real_file} "$output"').path
    build(Compiler((str(program),), "packager 1.0", "packager 1.0", False), [FOREIGN, FAST, SLOW], place / "prebuilt")
    return place / "prebuilt"


@pytest.fixture
def set_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetFlags:
    """Give this machine one CPU for each string of flags."""
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(cpu_info, "CPU_INFO", path)

    def set_flags(*cpus: str) -> None:
        path.write_text("".join(f"model\t\t: 1\nflags\t\t: {flags}\n\n" for flags in cpus))

    return set_flags


@pytest.fixture
def folder(packaged: Path, set_flags: SetFlags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This installation's prebuilt steps. The CPU can run two of them."""
    set_flags("simd wide other")
    path = tmp_path / "prebuilt"
    shutil.copytree(packaged, path)
    monkeypatch.setattr(prebuilt, "FOLDER", path)
    return path


@pytest.fixture
def cc(real_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """The only compiler of this machine; not given by $CC."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(compiler, "_NAMES", ("only-cc",))
    monkeypatch.setattr(compiler, "_zig_of_python", lambda: None)
    return FakeCompiler(programs / "only-cc", f'cp {real_file} "$output"')


COMPILED = "compiled by only-cc 1.0"


def change(folder: Path, **changes: Any) -> None:
    """Change the manifest's entries of files that this machine could run."""
    manifest = read_manifest(folder)
    builds = tuple(replace(one, **changes) if one.machine == MACHINE else one for one in manifest.builds)
    write_manifest(folder, replace(manifest, builds=builds))


def test_the_fastest_is_loaded_from_its_place(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """No compiler is run, nothing is written, and the line of the log says which file it is."""
    library = select_library("float32", cache_dir, lines.append)
    assert library.path == folder / "fast-float32.so"
    assert library.describe().endswith(", float32, prebuilt for fast")
    assert (cc.num_runs, list(cache_dir.iterdir()), lines) == (0, [], [])


@pytest.mark.parametrize("cpus", [["simd"], ["simd wide", "other simd"]])
def test_only_instructions_that_every_cpu_has_are_used(
    cpus: list[str], folder: Path, set_flags: SetFlags, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """The threads of a step run on all of them."""
    set_flags(*cpus)
    assert select_library("float32", cache_dir, lines.append).origin == "prebuilt for slow"
    assert lines == []


def test_a_cpu_that_can_run_none_compiles(
    folder: Path, set_flags: SetFlags, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    set_flags("other")
    library = select_library("float32", cache_dir, lines.append)
    assert library.origin == COMPILED
    assert library.describe().endswith(COMPILED)
    assert lines[-1] == "The prebuilt steps need a CPU with simd, which this one lacks."
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert cc.num_runs == 1


def test_a_machine_or_type_without_a_prebuilt_step_compiles(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    change(folder, number_type="bfloat16")
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert lines[-1] == f"There is no prebuilt float32 step for {MACHINE}."


@pytest.mark.parametrize("harm", ["shorter", "changed", "no file"])
def test_a_damaged_file_is_not_loaded(
    harm: str, folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """A library that ends before its sections do would end the worker by a signal when it is loaded."""
    reason = (
        "cannot be read (No such file or directory)"
        if harm == "no file"
        else f"is not the file that {MANIFEST} describes"
    )
    problems: list[str] = []
    for name, expected in (("fast-float32.so", "prebuilt for slow"), ("slow-float32.so", COMPILED)):
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        if harm != "no file":
            changed = content[:-1] + bytes([content[-1] ^ 1])
            path.write_bytes({"shorter": content[: len(content) // 2], "changed": changed}[harm])
        lines.clear()
        assert select_library("float32", cache_dir, lines.append).origin == expected
        problems.append(f"{name} {reason}")
        assert lines[-1] == f"Prebuilt steps in {folder} cannot be used: {'; '.join(problems)}. Install kvpool again."


def test_a_file_that_does_not_run_here_is_not_loaded(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """It is as the manifest says, and a process that loads it ends."""
    for path in folder.glob("*.so"):
        path.write_text("no library")
    change(folder, sha256=hashlib.sha256(b"no library").hexdigest())
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert "; slow-float32.so does not run here (OSError: " in lines[-1]
    assert "Install" not in lines[-1], "that would change nothing"


def test_steps_of_another_source_are_not_loaded(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """A checkout whose C was changed after they were built."""
    write_manifest(folder, replace(read_manifest(folder), source="0" * 64))
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert lines[-1].startswith(f"The steps in {folder} were built from another source.")


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"source": "", "compiler": "", "builds": [{}]}', "\0"])
def test_a_damaged_manifest_counts_as_none(
    content: str | None, folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    if content is None:
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text(content)
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert lines[-1].startswith(f"{folder / MANIFEST} cannot be read: ")


def test_an_installation_without_prebuilt_steps_compiles(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    """As every checkout: that is no problem, and no line of the log."""
    shutil.rmtree(folder)
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED
    assert len(lines) == 2, "compiling, compiled"


def test_cc_asks_for_a_compiled_step(
    folder: Path, cc: FakeCompiler, cache_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(cc.path))
    assert select_library("float32", cache_dir, lines.append).origin == COMPILED


@pytest.mark.parametrize("prebuilt_is", ["usable", "damaged", "missing"])
def test_a_cc_that_does_not_compile_is_replaced_by_a_prebuilt_step_only(
    prebuilt_is: str,
    folder: Path,
    cc: FakeCompiler,
    cache_dir: Path,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CC of another project must not cost the native step; another compiler of this machine was not asked for."""
    monkeypatch.setenv("CC", "/no/cc")
    problem = "CC must be a C compiler's command; there is no '/no/cc'. Correct or unset CC."
    if prebuilt_is == "usable":
        assert select_library("float32", cache_dir, lines.append).origin == "prebuilt for fast"
        assert lines == [f"{problem} The prebuilt step is used."]
    else:
        if prebuilt_is == "damaged":
            (folder / MANIFEST).write_text("")
        else:
            shutil.rmtree(folder)
        with pytest.raises(NoNativeLibrary) as raised:
            select_library("float32", cache_dir, lines.append)
        damage = f" {folder / MANIFEST} cannot be read: " if prebuilt_is == "damaged" else ""
        assert str(raised.value).startswith(problem + damage)
    assert cc.num_runs == 0


@pytest.mark.parametrize("has_files", [True, False])
def test_without_a_prebuilt_step_and_a_compiler_one_line_says_what_to_install(
    has_files: bool, folder: Path, set_flags: SetFlags, cc: FakeCompiler, cache_dir: Path, lines: list[str]
) -> None:
    set_flags("other")
    cc.path.unlink()
    if not has_files:
        shutil.rmtree(folder)
    with pytest.raises(NoNativeLibrary) as raised:
        select_library("float32", cache_dir, lines.append)
    assert str(raised.value) == (
        "The prebuilt steps need a CPU with simd, which this one lacks. "
        if has_files
        else "This installation has no prebuilt step. "
    ) + ("A C compiler is needed; there is no only-cc in PATH. Install gcc, or the Python package ziglang.")
    assert lines == []


def test_a_folder_is_filled_again(packaged: Path, tmp_path: Path, real_file: Path) -> None:
    """What it held before does not stay; without a manifest its files count for nothing."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "old-float32.so").write_text("old")
    shutil.copy(packaged / MANIFEST, folder)
    broken = FakeCompiler(tmp_path / "broken", "exit 1").path
    with pytest.raises(NoNativeLibrary, match="cannot compile"):
        build(Compiler((str(broken),), "broken 1.0", "", False), [FAST], folder)
    assert not (folder / MANIFEST).exists()
    program = FakeCompiler(tmp_path / "packager", f'cp {real_file} "$output"').path
    manifest = build(Compiler((str(program),), "packager 1.0", "", False), [SLOW], folder)
    digest = hashlib.sha256(real_file.read_bytes()).hexdigest()
    assert manifest.builds == (Build("slow-float32.so", digest, "float32", "slow", MACHINE, ("simd",)),)
    assert read_manifest(folder) == manifest
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "slow-float32.so"]


def test_a_step_that_should_run_on_this_cpu_and_does_not_is_not_packaged(tmp_path: Path, set_flags: SetFlags) -> None:
    set_flags("simd")
    program = FakeCompiler(tmp_path / "packager", 'echo text > "$output"').path
    with pytest.raises(NoNativeLibrary, match=r"slow-float32\.so, compiled by packager 1\.0, does not run on this CPU"):
        build(Compiler((str(program),), "packager 1.0", "", False), [SLOW], tmp_path / "prebuilt")


@pytest.mark.zig
def test_zig_compiles_for_other_machines(tmp_path: Path) -> None:
    """For both kinds, by the first bytes of the files, and for AMX, by an instruction; what this CPU can run is tried."""
    zig = find_zig()
    assert zig is not None
    narrow = [
        replace(target, number_types=("float32",), options=(*target.options, "-O1")) for target in (X86_64_V3, AARCH64)
    ]
    # Not tried: Linux may refuse its registers.
    amx = replace(X86_64_V4_AMX, cpu_flags=frozenset({"none"}), options=(*X86_64_V4_AMX.options, "-O1"))
    manifest = build(zig, [amx, *narrow], tmp_path)
    machines = {one.machine: (tmp_path / one.file).read_bytes()[18:20] for one in manifest.builds}
    assert machines == {"x86_64": b"\x3e\0", "aarch64": b"\xb7\0"}  # e_machine of ELF
    assert TILE_PRODUCT in (tmp_path / "x86-64-v4+amx-bfloat16.so").read_bytes()


def test_of_two_targets_the_one_that_needs_more_comes_first() -> None:
    """A worker takes the first one that its CPU can run."""
    for index, target in enumerate(TARGETS):
        earlier = [one for one in TARGETS[:index] if one.machine == target.machine]
        assert not any(one.cpu_flags < target.cpu_flags for one in earlier)
