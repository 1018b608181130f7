"""A compiler or a cache folder that is missing, broken, slow or not to be trusted gives one clear line, and never another error."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.worker_service.native.cpu import build_cache, build_lock, compiler, cpu_info
from kvpool.worker_service.native.cpu.build_cache import compiled_library
from kvpool.worker_service.native.cpu.compiler import NoNativeLibrary, find_compilers
from kvpool.worker_service.native.cpu.library import open_library
from tests.native.fake_compiler import FakeCompiler
from tests.until import until


@pytest.fixture
def good(real_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """$CC, which writes a step that runs, at once."""
    fake = FakeCompiler(tmp_path / "good", f'cp {real_file} "$output"')
    monkeypatch.setenv("CC", str(fake.path))
    return fake


def refusal(cache_dir: Path, lines: list[str]) -> str:
    with pytest.raises(NoNativeLibrary) as raised:
        compiled_library("float32", cache_dir, lines.append)
    message = str(raised.value)
    assert "\n" not in message
    native = cache_dir / "native"
    assert not native.is_dir() or not list(native.iterdir()), "a failed build leaves nothing"
    return message


def kept(cache_dir: Path) -> Path:
    (file,) = (cache_dir / "native").iterdir()
    return file


def not_mine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it another user's."""
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_the_step_is_compiled_once_and_then_found(cache_dir: Path, good: FakeCompiler, lines: list[str]) -> None:
    first = compiled_library("float32", cache_dir, lines.append)
    assert [line.partition(" in ")[0] for line in lines] == [
        "compiling the float32 step with good 1.0: a few seconds",
        "compiled the float32 step",
    ]
    second = compiled_library("float32", cache_dir, lines.append)
    assert first.path == second.path == kept(cache_dir)
    assert good.num_runs == 1
    assert len(lines) == 2
    assert first.numbers_per_word == 1


def test_each_type_compiler_and_cpu_has_a_file_of_its_own(
    cache_dir: Path, tmp_path: Path, good: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache folder may be shared by machines."""
    paths = {compiled_library("float32", cache_dir, print).path, compiled_library("bfloat16", cache_dir, print).path}
    other_cpu = tmp_path / "cpuinfo"
    other_cpu.write_text("model name\t: another\nflags\t\t: sse2\n")
    with monkeypatch.context() as patch:
        patch.setattr(cpu_info, "CPU_INFO", other_cpu)
        paths.add(compiled_library("float32", cache_dir, print).path)
    good.path.write_text(good.path.read_text().replace("fake 1.0", "fake 1.1"))
    paths.add(compiled_library("float32", cache_dir, print).path)
    assert len(paths) == good.num_runs == 4


def test_no_compiler(cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "_zig_of_python", lambda: None)
    assert refusal(cache_dir, lines) == (
        "A C compiler is needed; there is no cc, gcc, clang in PATH. Install gcc, or the Python package ziglang."
    )


@pytest.mark.parametrize("given", ["no-such-compiler", "'unbalanced", "/"])
def test_cc_names_no_compiler(given: str, cache_dir: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", given)
    assert refusal(cache_dir, lines).startswith("CC must be a C compiler's command; ")


def test_cc_cannot_be_started(
    cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "text"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    assert "cannot be started: Exec format error" in refusal(cache_dir, lines)


def test_cc_may_have_arguments(cache_dir: Path, good: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"env A=1 {good.path}")
    (found,) = find_compilers()
    assert found.command[1:] == ("A=1", str(good.path))
    compiled_library("float32", cache_dir, print)
    assert good.num_runs == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "echo warning: x; echo step.c:1: fatal error: no headers >&2; exit 3",
            "exit status 3: step.c:1: fatal error: no headers.",
        ),
        ("exit 1", "exit status 1: no output."),
        ("kill -9 $$", "ended by signal 9."),
        ("true", "ended without an error and without a file."),
        ('echo text > "$output"', "does not run here: OSError: "),
        ("printf '\\033[31merror\\n'; exit 1", "exit status 1: [31merror."),
    ],
)
def test_a_compiler_that_fails(
    body: str, expected: str, cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line has the compiler's own first error, in printable characters."""
    monkeypatch.setenv("CC", str(FakeCompiler(tmp_path / "bad", body).path))
    message = refusal(cache_dir, lines)
    assert message.startswith(("bad 1.0 ", "The step that bad 1.0 compiled "))
    assert expected in message
    assert message.isprintable()


def test_a_compiler_that_has_no_version(
    cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(FakeCompiler(tmp_path / "bad", "true", version="echo unknown option; exit 1").path))
    assert "bad --version failed: exit status 1: unknown option." in refusal(cache_dir, lines)


def test_a_version_that_does_not_come(
    cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_VERSION_LIMIT_S", 0.2)
    monkeypatch.setenv("CC", str(FakeCompiler(tmp_path / "slow", "true", version="sleep 1000").path))
    assert "slow --version took more than" in refusal(cache_dir, lines)


async def test_a_compiler_that_hangs_is_killed_with_its_children(
    cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    fake = FakeCompiler(tmp_path / "slow", f"sleep 1000 & echo $! > {child}.new; mv {child}.new {child}; wait")
    monkeypatch.setattr(compiler, "_COMPILE_LIMIT_S", 3)
    monkeypatch.setenv("CC", str(fake.path))
    assert refusal(cache_dir, lines).startswith("slow 1.0 compiled for more than 3 s and was ended.")
    await until(lambda: not is_running(int(child.read_text())))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_next_compiler_is_used_if_the_first_fails(
    cache_dir: Path, tmp_path: Path, good: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from then on its file, without another try of the first."""
    programs = tmp_path / "bin"
    programs.mkdir()
    bad = FakeCompiler(programs / "cc", "exit 1")
    good.path.rename(programs / "clang")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(compiler, "_NAMES", ("cc", "clang"))
    for _ in range(2):
        compiled_library("float32", cache_dir, print)
    assert (bad.num_runs, good.num_runs) == (1, 1)


def test_a_cpu_whose_tile_registers_are_refused_gets_a_step_without_them(
    cache_dir: Path, tmp_path: Path, real_file: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux, or a container, may keep from a process what the CPU has. The trial finds it out, once. float32 does not need them."""
    amx = tmp_path / "cpuinfo"
    amx.write_text("flags\t\t: sse2 amx_bf16 amx_tile\n")
    monkeypatch.setattr(cpu_info, "CPU_INFO", amx)
    without = f'case "$arguments" in *KVPOOL_NO_TILES*) cp {real_file} "$output";; *) echo text > "$output";; esac'
    fake = FakeCompiler(tmp_path / "fake", without)
    monkeypatch.setenv("CC", str(fake.path))
    paths = {compiled_library("bfloat16", cache_dir, lines.append).path for _ in range(2)}
    assert paths == {kept(cache_dir)}
    assert fake.num_runs == 2
    assert [line for line in lines if "fake 1.0 compiled does not run here: " in line] == lines[-1:]
    with pytest.raises(NoNativeLibrary):
        compiled_library("float32", cache_dir, print)
    assert fake.num_runs == 3


def test_a_kept_step_whose_tile_registers_are_refused_now_is_not_loaded(
    cache_dir: Path, tmp_path: Path, good: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers with other permissions may share a cache folder."""
    amx = tmp_path / "cpuinfo"
    amx.write_text("flags\t\t: sse2 amx_bf16 amx_tile\n")
    monkeypatch.setattr(cpu_info, "CPU_INFO", amx)
    monkeypatch.setattr(build_cache, "open_library", lambda path: replace(open_library(path), has_tiles=True))
    first = compiled_library("bfloat16", cache_dir, print).path
    assert compiled_library("bfloat16", cache_dir, print).path == first
    refused = {first.name: "Linux does not give them"}
    monkeypatch.setattr(build_cache, "why_it_does_not_run", lambda path: refused.get(path.name))
    assert compiled_library("bfloat16", cache_dir, print).path != first
    assert good.num_runs == 3


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("void kvpool_describe_build(void) {}", "lacks a function"),
        ("__attribute__((constructor)) static void start(void) { __builtin_trap(); }", "ended by signal "),
    ],
)
def test_a_file_that_does_not_run_here_is_not_loaded(
    function: str, expected: str, cache_dir: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An illegal instruction ends the process of the trial, not the worker."""
    source = tmp_path / "wrong.c"
    source.write_text(function)
    real = find_compilers()[0]
    fake = FakeCompiler(tmp_path / "fake", f'{" ".join(real.command)} -shared -fPIC {source} -o "$output"')
    monkeypatch.setenv("CC", str(fake.path))
    message = refusal(cache_dir, lines)
    assert "does not run here: " in message
    assert expected in message


@pytest.mark.parametrize("harm", ["shorter", "empty", "changed", "no file"])
def test_a_torn_file_is_built_again_once(harm: str, cache_dir: Path, good: FakeCompiler) -> None:
    """A library that ends before its sections do would end the worker by a signal when it is loaded."""
    path = compiled_library("float32", cache_dir, print).path
    content = path.read_bytes()
    path.unlink()  # this process has it loaded: harm done to it would end the process
    if harm != "no file":
        changed = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"shorter": content[: len(content) // 2], "empty": b"", "changed": changed}[harm])
    assert compiled_library("float32", cache_dir, print).path == path
    assert good.num_runs == 2
    assert path.read_bytes() == content


def test_a_whole_file_with_other_functions_is_built_again(cache_dir: Path, tmp_path: Path, good: FakeCompiler) -> None:
    path = compiled_library("float32", cache_dir, print).path
    source = tmp_path / "wrong.c"
    source.write_text("int other;")
    path.unlink()
    subprocess.run([*find_real().command, "-shared", "-fPIC", source, "-o", path], check=True)
    build_cache._seal(path)
    assert compiled_library("float32", cache_dir, print).path == path
    assert good.num_runs == 2


def find_real() -> compiler.Compiler:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC", raising=False)
        return find_compilers()[0]


@pytest.mark.parametrize("place", ["cache folder", "its folder of steps"])
def test_a_cache_folder_that_cannot_be_written(
    place: str, tmp_path: Path, cache_dir: Path, good: FakeCompiler, lines: list[str]
) -> None:
    """The step is compiled into a temporary folder, which is gone when the library is loaded."""
    if place == "cache folder":
        cache_dir = tmp_path / "good" / "cache"  # below a file
    else:
        (cache_dir / "native").symlink_to("/proc/self/task")  # not even root can write there
    library = compiled_library("float32", cache_dir, lines.append)
    assert lines[0].startswith(f"the compiled step is not kept, each start compiles it: {cache_dir}/native cannot be ")
    assert not library.path.parent.exists()
    assert library.functions.kvpool_open


@pytest.mark.parametrize("place", ["cache folder", "its folder of steps", "file"])
@pytest.mark.parametrize("harm", ["foreign", "writable by others"])
def test_what_others_could_have_written_is_not_loaded(
    place: str, harm: str, cache_dir: Path, good: FakeCompiler, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = compiled_library("float32", cache_dir, print).path
    path = {"cache folder": cache_dir, "its folder of steps": file.parent, "file": file}[place]
    if harm == "foreign":
        not_mine(path, monkeypatch)
    else:
        path.chmod(0o777)
    library = compiled_library("float32", cache_dir, lines.append)
    assert good.num_runs == 2
    if place != "file":
        assert lines[0].startswith(f"the compiled step is not kept, each start compiles it: {path} ")
        assert not library.path.exists()
    elif os.geteuid() == 0 or harm != "foreign":
        assert library.path == file, "a file of ours takes its place"
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_shared_folder_with_a_sticky_bit_is_trusted(cache_dir: Path, good: FakeCompiler) -> None:
    """In it only the owner can replace a folder."""
    cache_dir.chmod(0o1777)
    for _ in range(2):
        compiled_library("float32", cache_dir, print)
    assert good.num_runs == 1


def test_what_killed_processes_left_is_removed_and_the_work_of_others_is_not(
    cache_dir: Path, good: FakeCompiler
) -> None:
    folders = [cache_dir / "native" / name for name in ("build-abandoned", "build-running")]
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True)
        (folder / "step.s").write_text("")
    folders[0].parent.chmod(0o700)
    os.utime(folders[0], (0, 0))
    compiled_library("float32", cache_dir, print)
    assert [folder.exists() for folder in folders] == [False, True]


IN_A_PROCESS = (
    "import sys, pathlib; from kvpool.worker_service.native.cpu.build_cache import compiled_library;"
    "print(compiled_library('float32', pathlib.Path(sys.argv[1]), lambda line: print(line, file=sys.stderr)).path)"
)


def start(cache_dir: Path, fake: FakeCompiler, log: Path) -> subprocess.Popen[str]:
    """A process that compiles, with its lines of progress in the log."""
    environment = {**os.environ, "CC": str(fake.path), "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", IN_A_PROCESS, str(cache_dir)]
    with log.open("w") as stderr:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_two_processes_that_start_at_the_same_time_compile_once(
    cache_dir: Path, tmp_path: Path, real_file: Path
) -> None:
    """The compiler ends when the other process waits for it, or runs a compiler too."""
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    both = f"grep -q waiting {tmp_path}/*.log || [ $(wc -l < {tmp_path}/fake.runs) -gt 1 ]"
    fake = FakeCompiler(tmp_path / "fake", f'until {both}; do sleep 0.05; done; cp {real_file} "$output"')
    processes = [start(cache_dir, fake, log) for log in logs]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert paths == {str(kept(cache_dir))}
    assert fake.num_runs == 1


async def test_a_killed_process_leaves_no_lock(
    cache_dir: Path, tmp_path: Path, good: FakeCompiler, lines: list[str]
) -> None:
    """Nor does its compiler, which runs on."""
    child = tmp_path / "child"
    slow = FakeCompiler(tmp_path / "slow", f"echo $$ > {child}.new; mv {child}.new {child}; exec sleep 1000")
    process = start(cache_dir, slow, tmp_path / "slow.log")
    try:
        await until(child.exists)
        process.kill()
        process.communicate(timeout=120)
        compiled_library("float32", cache_dir, lines.append)
        assert is_running(int(child.read_text()))
    finally:
        if child.exists():
            os.kill(int(child.read_text()), signal.SIGKILL)
    assert good.num_runs == 1
    assert lines[0].startswith("compiling "), "and not waiting"


def test_a_lock_is_not_waited_for_without_end(
    cache_dir: Path, good: FakeCompiler, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped in the middle of a build holds it."""
    monkeypatch.setattr(build_lock, "_LIMIT_S", 0.2)
    folder = cache_dir / "native"
    folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        compiled_library("float32", cache_dir, lines.append)
    finally:
        os.close(descriptor)
    assert good.num_runs == 1
    assert lines[:2] == [
        f"another process compiles in {folder}: waiting for it",
        f"another process has compiled in {folder} for more than 0 s: not waiting any longer",
    ]


def test_without_locks_it_compiles(
    cache_dir: Path, good: FakeCompiler, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""

    def flock(descriptor: int, mode: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert compiled_library("float32", cache_dir, lines.append).path == kept(cache_dir)
    assert len(lines) == 2, "compiling, compiled"


@pytest.mark.parametrize("compiler_now", ["missing", "fails", "given"])
def test_what_a_compiler_of_earlier_made_is_used_if_none_works_now(
    compiler_now: str,
    cache_dir: Path,
    tmp_path: Path,
    good: FakeCompiler,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiler was removed after the first start. One that $CC asks for is not replaced by another."""
    path = compiled_library("float32", cache_dir, print).path
    if compiler_now == "given":
        good.path.unlink()
        with pytest.raises(NoNativeLibrary, match="CC must be a C compiler's command"):
            compiled_library("float32", cache_dir, lines.append)
        return
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(compiler, "_NAMES", ("only-cc",))
    monkeypatch.setattr(compiler, "_zig_of_python", lambda: None)
    if compiler_now == "fails":
        FakeCompiler(programs / "only-cc", "exit 1")
    library = compiled_library("float32", cache_dir, lines.append)
    assert (library.path, library.origin) == (path, "compiled earlier")
    assert lines[-1].endswith(" The step compiled earlier is used.")
    with pytest.raises(NoNativeLibrary):
        compiled_library("bfloat16", cache_dir, lines.append)
    monkeypatch.setattr(compiler, "_FLAGS", ("-O1",))
    with pytest.raises(NoNativeLibrary):
        compiled_library("float32", cache_dir, lines.append)
