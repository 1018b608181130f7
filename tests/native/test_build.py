"""setup.py compiles the step for every kind of CPU; what it cannot compile costs a warning, or the build where it is required."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu.selection import SOURCES
from kvpool.worker_service.native.cpu.targets import (
    AARCH64,
    AARCH64_BF16,
    FLAGS,
    TARGETS,
    X86_64_V3,
    X86_64_V4_AMX,
    BuildTarget,
    flags,
)
from tests.native.test_build_selection import TILE_PRODUCT

ROOT = Path(__file__).parents[2]
STEP = "worker_service/native/cpu"
WANTED = {
    one.file_name(kind): (one, kind)
    for one in TARGETS
    for kind in one.number_types
    if one.machine == platform.machine()
}
COST = "A CPU with no other build that it can run computes with torch: steps take two to six times as long."

pytestmark = pytest.mark.skipif(not WANTED, reason="the step is not built for this kind of machine")


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
