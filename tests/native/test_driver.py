"""Steps from a C program without Python: the same bits in every batch, on every build that this CPU can run; sanitizers."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu import cpu_info
from kvpool.worker_service.native.cpu.compiler import SOURCE_DIR, Compiler, NumberType, find_compilers, run_command
from scripts.native_builds import X86_64_V3, X86_64_V4

pytestmark = pytest.mark.compiler

FOLDER = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-missing-field-initializers", "-Wno-unknown-pragmas")
SANITIZERS = {
    "address,undefined": ("libasan and libubsan", "small", "-O0"),
    "thread": ("libtsan", "threads", "-O1"),
}
FEW_KEYS = 64
"""Of a partition, where a step is slow: sequences of several partitions are short then."""


def run_driver(program: Path, *arguments: str) -> str:
    """Exit status 0 and nothing on stderr. Returns the line that describes the build."""
    command = [str(program), *arguments]
    variables = {"LD_PRELOAD": "", "TSAN_OPTIONS": "halt_on_error=1"}
    finished = run_command(command, 250.0, variables)
    if (
        "unexpected memory mapping" in finished.output
    ):  # libtsan of gcc 12, on a kernel with 32 random bits in addresses
        finished = run_command(["setarch", "-R", *command], 250.0, variables)
    assert finished.status == 0, f"{program.name}: {finished.output}"
    last = finished.output.splitlines()[-1]
    assert last.startswith("W "), finished.output
    return last


def levels() -> list[str]:
    """The instruction sets, older than this CPU's own, that it can run."""
    if platform.machine() != "x86_64":
        return []
    flags = cpu_info.flags()
    return [target.name for target in (X86_64_V3, X86_64_V4) if target.cpu_flags <= flags]


def compile_with(compiler: Compiler, number_type: NumberType, *arguments: str | Path) -> None:
    dropped = ("-O2", "-ftree-vectorize", "-shared", "-fPIC", "-march=native")
    kept = [flag for flag in compiler.flags(number_type) if flag not in dropped]
    command = [*compiler.command, *kept, *WARNINGS, f"-I{SOURCE_DIR}", *map(str, arguments)]
    finished = run_command(command, 250.0)
    assert finished.status == 0, finished.output


def for_cpu(compiler: Compiler, level: str) -> list[str]:
    if compiler.is_zig:
        return [f"-mcpu={level.replace('-', '_')}"]
    if platform.machine() == "aarch64":
        return [f"-mcpu={level}"]
    return [f"-march={level}"] if platform.machine() == "x86_64" else []


@pytest.fixture(scope="module")
def built(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What the compiler makes of these files and flags, by its name. Built again when something has changed."""
    sources = [path.read_bytes() for folder in (SOURCE_DIR, FOLDER) for path in sorted(folder.glob("*.[ch]"))]

    def built(name: str, number_type: NumberType, *arguments: str | Path) -> Path:
        compiler = find_compilers()[0]
        given = repr((compiler, number_type, [str(argument) for argument in arguments]))
        digest = hashlib.sha256(b"".join([*sources, given.encode()])).hexdigest()[:16]
        file = build_folder / f"{name}-{digest}"
        if not file.exists():
            new = tmp_path_factory.mktemp("built") / name
            compile_with(compiler, number_type, *arguments, "-o", new)
            for old in build_folder.glob(f"{name}-{'?' * 16}"):
                old.unlink()
            shutil.move(new, file)
        return file

    return built


@pytest.fixture(scope="module")
def build(built: Callable[..., Path]) -> Callable[..., Path]:
    """A driver with its step, by number type, instruction set and flags of the step."""

    def build(number_type: NumberType, level: str, *flags: str) -> Path:
        cpu = for_cpu(find_compilers()[0], level)
        late, name = "-DKVPOOL_TEST_DELAY=driver_delay", f"{number_type}-{level}"
        # The driver has no checks of its own: its reference would be slow. Several steps are linked with the same one.
        driver = built(f"driver-{name}.o", number_type, *cpu, "-O1", late, "-c", FOLDER / "driver.c")
        name = re.sub(r"\W+", "-", f"{name} {' '.join(flags)}")
        step = built(f"step-{name}.o", number_type, *cpu, late, *flags, "-c", SOURCE_DIR / "step.c")
        return built(f"driver-{name}", number_type, *flags, driver, step, "-lm")

    return build


@pytest.mark.parametrize("number_type", ["float32", "bfloat16"])
def test_the_step_as_workers_run_it(
    number_type: NumberType, tmp_path: Path, step_file: Callable[[NumberType], Path]
) -> None:
    """All shapes and all teams, with the very file that a worker loads."""
    compiler, file, program = find_compilers()[0], step_file(number_type), tmp_path / "driver"
    cpu = compiler.flags(number_type)[-2]
    compile_with(
        compiler, number_type, cpu, "-O1", FOLDER / "driver.c", "-o", program, file, "-lm", f"-Wl,-rpath,{file.parent}"
    )
    run_driver(program, "all")


@pytest.mark.parametrize(
    ("level", "number_type"),
    # In float32 AVX-512 with and without bfloat16's instructions is one step.
    [
        (level, kind)
        for level in levels()
        for kind in ("float32", "bfloat16")
        if (level, kind) != ("x86-64-v4", "float32")
    ],
)
def test_the_step_as_older_cpus_run_it(level: str, number_type: NumberType, build: Callable[..., Path]) -> None:
    """Compiled in two thirds of the time that a worker's -O2 takes, with which this CPU's own step is tested."""
    run_driver(build(number_type, level, "-O1"), "small")


@pytest.mark.parametrize(("sanitizer", "number_type"), [("address,undefined", "bfloat16"), ("thread", "float32")])
def test_sanitizers_report_nothing(
    sanitizer: str, number_type: NumberType, tmp_path: Path, build: Callable[..., Path]
) -> None:
    """Of the narrowest build: it has fewest variants, which take long to compile with checks. For the addresses unoptimized, which
    takes less time in all."""
    if find_compilers()[0].is_zig:
        pytest.skip("zig has no runtimes of the sanitizers; they need gcc or clang")
    package, argument, optimization = SANITIZERS[sanitizer]
    program = tmp_path / "empty"
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    check = run_command(
        [*find_compilers()[0].command, f"-fsanitize={sanitizer}", str(tmp_path / "empty.c"), "-o", str(program)], 100.0
    )
    assert check.status == 0, f"-fsanitize={sanitizer} needs the compiler's {package}: {check.output}"
    flags = (optimization, f"-DPARTITION={FEW_KEYS}", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    run_driver(build(number_type, (levels() or ["native"])[0], *flags), argument, str(FEW_KEYS))


def test_products_in_tile_registers(build: Callable[..., Path]) -> None:
    """The instructions of AMX in plain C, on any CPU: no other rows, numbers or words are read than those of the product, whatever
    their number. Unoptimized, which takes less time in all."""
    sanitizers = () if find_compilers()[0].is_zig else ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    level, few = (levels() or ["native"])[0], f"-DPARTITION={FEW_KEYS}"
    program = build("bfloat16", level, "-O0", few, "-DKVPOOL_TILES_IN_C", *sanitizers)
    assert ", P 2, tiles, " in run_driver(program, "products", str(FEW_KEYS))


def test_a_race_is_reported(tmp_path: Path) -> None:
    """The thread sanitizer of this machine works, and what it reports fails a test. Many accesses: it can miss a single pair."""
    if find_compilers()[0].is_zig:
        pytest.skip("zig has no runtimes of the sanitizers; they need gcc or clang")
    source = tmp_path / "race.c"
    source.write_text(
        "#include <pthread.h>\nvolatile int x;\nvoid *add(void *a) { for (int i = 0; i < 100000; i++) x++; return a; }\n"
        "int main(void) { pthread_t t; pthread_create(&t, 0, add, 0); add(0); pthread_join(t, 0); return 0; }\n"
    )
    program = tmp_path / "race"
    compile_with(find_compilers()[0], "float32", "-g", "-fsanitize=thread", source, "-o", program)
    with pytest.raises(AssertionError, match="data race"):
        run_driver(program, "all")
