"""Steps from a C program without Python: the same bits in every batch, on every build that this CPU can run; sanitizers."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu.selection import (
    BUILDS,
    SOURCES,
    NoNativeStep,
    fitting_targets,
    load_step,
    tile_refusal,
)
from kvpool.worker_service.native.cpu.targets import (
    FLAGS,
    BuildTarget,
    NumberType,
    find_compiler,
    flags,
    is_zig,
)

pytestmark = [pytest.mark.compiler, pytest.mark.native]

FOLDER = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-Wno-unknown-pragmas")
SANITIZERS = {
    "address,undefined": ("libasan and libubsan", "small", "-O0"),
    "thread": ("libtsan", "threads", "-O1"),
}
NUMBER_TYPES: tuple[NumberType, ...] = ("float32", "bfloat16")
FEW_KEYS = 64
"""Of a partition, where a step is slow: sequences of several partitions are short then."""


def run_driver(program: Path, *arguments: str) -> str:
    """Exit status 0 and nothing on stderr. Returns the line that describes the build."""
    command = [str(program), *arguments]
    variables = {"LD_PRELOAD": "", "TSAN_OPTIONS": "halt_on_error=1"}
    done = run(command, variables)
    if "unexpected memory mapping" in done.stdout:  # libtsan of gcc 12, on a kernel with 32 random bits in addresses
        done = run(["setarch", "-R", *command], variables)
    assert done.returncode == 0, f"{program.name}: {done.stdout}"
    last = done.stdout.splitlines()[-1]
    assert last.startswith("W "), done.stdout
    return last


def run(command: Sequence[str], variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Its exit status, and in stdout all that it has printed."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "LC_ALL": "C", **(variables or {})},
    )


def compiler() -> list[str]:
    found = find_compiler()
    assert found is not None
    return found


def fitting(number_type: NumberType) -> list[BuildTarget]:
    """The kinds of CPU whose builds run here, the fastest first; none: all tests are left out."""
    try:
        return [one for one in fitting_targets(number_type) if not one.has_tiles or tile_refusal() is None]
    except NoNativeStep:
        return []


def narrowest() -> BuildTarget:
    return fitting("float32")[-1]


def compile_with(target: BuildTarget, number_type: NumberType, *arguments: str | Path) -> None:
    dropped = ("-O2", "-ftree-vectorize", "-shared", "-fPIC")
    kept = [flag for flag in flags(compiler(), target, number_type) if flag not in dropped]
    done = run([*compiler(), *kept, *WARNINGS, f"-I{SOURCES}", *map(str, arguments)])
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def built(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What the compiler makes of these files and flags, by its name. Built again when something has changed."""
    sources = [path.read_bytes() for folder in (SOURCES, FOLDER) for path in sorted(folder.glob("*.[ch]"))]

    def built(name: str, target: BuildTarget, number_type: NumberType, *arguments: str | Path) -> Path:
        version = run([*compiler(), "--version"]).stdout
        given = repr((version, FLAGS, target.name, number_type, [str(argument) for argument in arguments]))
        digest = hashlib.sha256(b"".join([*sources, given.encode()])).hexdigest()[:16]
        file = build_folder / f"{name}-{digest}"
        if not file.exists():
            new = tmp_path_factory.mktemp("built") / name
            compile_with(target, number_type, *arguments, "-o", new)
            for old in build_folder.glob(f"{name}-{'?' * 16}"):
                old.unlink()
            shutil.move(new, file)
        return file

    return built


@pytest.fixture(scope="module")
def build(built: Callable[..., Path]) -> Callable[..., Path]:
    """A driver with its step, by number type, kind of CPU and flags of the step."""

    def build(number_type: NumberType, target: BuildTarget, *flags: str) -> Path:
        late, name = "-DKVPOOL_TEST_DELAY=driver_delay", f"{number_type}-{target.name}"
        # The driver has no checks of its own: its reference would be slow. Several steps are linked with the same one.
        driver = built(f"driver-{name}.o", target, number_type, "-O1", late, "-c", FOLDER / "driver.c")
        name = re.sub(r"\W+", "-", f"{name} {' '.join(flags)}")
        step = built(f"step-{name}.o", target, number_type, late, *flags, "-c", SOURCES / "step.c")
        return built(f"driver-{name}", target, number_type, *flags, driver, step, "-lm")

    return build


@pytest.mark.parametrize(
    ("target", "number_type"),
    [(target, kind) for kind in NUMBER_TYPES for target in fitting(kind)],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_a_build_that_this_cpu_can_run(
    target: BuildTarget, number_type: NumberType, tmp_path: Path, built: Callable[..., Path]
) -> None:
    """The very file that a worker loads here or on an older CPU: of the fastest, which has most variants, all shapes and teams."""
    file, program = BUILDS / target.file_name(number_type), tmp_path / "driver"
    driver = built(f"worker-{number_type}-{target.name}.o", target, number_type, "-O1", "-c", FOLDER / "driver.c")
    compile_with(target, number_type, driver, "-o", program, file, "-lm", f"-Wl,-rpath,{file.parent}")
    run_driver(program, "all" if file == load_step(number_type, print).path else "small")


@pytest.mark.parametrize(("sanitizer", "number_type"), [("address,undefined", "bfloat16"), ("thread", "float32")])
def test_sanitizers_report_nothing(
    sanitizer: str, number_type: NumberType, tmp_path: Path, build: Callable[..., Path]
) -> None:
    """Of the narrowest build: it has fewest variants, which take long to compile with checks. For the addresses unoptimized, which
    takes less time in all."""
    if is_zig(compiler()):
        pytest.skip("zig has no runtimes of the sanitizers; they need gcc or clang")
    package, argument, optimization = SANITIZERS[sanitizer]
    program = tmp_path / "empty"
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    check = run([*compiler(), f"-fsanitize={sanitizer}", str(tmp_path / "empty.c"), "-o", str(program)])
    assert check.returncode == 0, f"-fsanitize={sanitizer} needs the compiler's {package}: {check.stdout}"
    flags = (optimization, f"-DPARTITION={FEW_KEYS}", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    run_driver(build(number_type, narrowest(), *flags), argument, str(FEW_KEYS))


def test_products_in_tile_registers(build: Callable[..., Path]) -> None:
    """The instructions of AMX in plain C, on any CPU: no other rows, numbers or words are read than those of the product, whatever
    their number. Unoptimized, which takes less time in all."""
    sanitizers = () if is_zig(compiler()) else ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    few = f"-DPARTITION={FEW_KEYS}"
    program = build("bfloat16", narrowest(), "-O0", few, "-DKVPOOL_TILES_IN_C", *sanitizers)
    assert ", P 2, tiles, " in run_driver(program, "products", str(FEW_KEYS))


def test_a_race_is_reported(tmp_path: Path) -> None:
    """The thread sanitizer of this machine works, and what it reports fails a test. Many accesses: it can miss a single pair."""
    if is_zig(compiler()):
        pytest.skip("zig has no runtimes of the sanitizers; they need gcc or clang")
    source = tmp_path / "race.c"
    source.write_text(
        "#include <pthread.h>\nvolatile int x;\nvoid *add(void *a) { for (int i = 0; i < 100000; i++) x++; return a; }\n"
        "int main(void) { pthread_t t; pthread_create(&t, 0, add, 0); add(0); pthread_join(t, 0); return 0; }\n"
    )
    program = tmp_path / "race"
    compile_with(narrowest(), "float32", "-g", "-fsanitize=thread", source, "-o", program)
    with pytest.raises(AssertionError, match="data race"):
        run_driver(program, "all")
