"""C compilers of this machine, and the compiling of the step with one of them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

NumberType = Literal["float32", "bfloat16"]

SOURCE_DIR = Path(__file__).parent / "csrc"
_NAMES = ("cc", "gcc", "clang")
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-ftree-vectorize",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
    "-pthread",
)
_COMPILE_LIMIT_S = 120.0
_VERSION_LIMIT_S = 30.0


class NoNativeLibrary(RuntimeError):
    """There is no compiled step here. The message is one line: what was needed, what there is, and what to change."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler that has reported its version."""

    command: tuple[str, ...]
    """Its full path and arguments that precede all others."""
    name: str
    """Shown to users: `gcc 12.2.0`."""
    version: str
    """The whole output of `--version`."""
    is_zig: bool

    def flags(
        self, number_type: NumberType, target: Sequence[str] | None = None, with_tiles: bool = True
    ) -> tuple[str, ...]:
        """All of them but the files'. They are never those of -ffast-math: NaN must stay NaN. `target`: options that name
        another CPU than this one. with_tiles: use AMX's tile registers if the CPU has them."""
        cpu = self._for_this_cpu() if target is None else target
        tiles = () if with_tiles else ("-DKVPOOL_NO_TILES",)
        return (*_FLAGS, *tiles, *cpu, f"-DBFLOAT16={int(number_type == 'bfloat16')}")

    def _for_this_cpu(self) -> tuple[str, ...]:
        machine = platform.machine().lower()
        if self.is_zig or machine in ("aarch64", "arm64"):
            return ("-mcpu=native",)
        return ("-march=native",) if machine in ("x86_64", "amd64") else ()


class Finished(NamedTuple):
    """A command that has ended."""

    status: int | None
    """None: it ran past its time limit and was killed, with its children."""
    output: str


def given_command() -> str:
    """$CC, with which a user asks for this compiler and no other; empty if it is not set."""
    return os.environ.get("CC", "").strip()


def source_digest() -> str:
    """Of the step's source and of the flags that all compilers get."""
    files = sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in (".c", ".h"))
    sources = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    return hashlib.sha256(json.dumps([sources, _FLAGS]).encode()).hexdigest()


def find_compilers() -> list[Compiler]:
    """Those to try, in order: $CC alone if it is set, else cc, gcc, clang, and the one of the Python package ziglang.

    Raises NoNativeLibrary if there is none, or if $CC names none.
    """
    if given := given_command():
        return [_given_compiler(given)]
    commands: dict[str, tuple[str, ...]] = {}
    for name in _NAMES:
        if path := shutil.which(name):
            commands.setdefault(os.path.realpath(path), (path,))  # cc is a link to one of the others
    if (zig := _zig_of_python()) is not None:
        commands["ziglang"] = (str(zig), "cc")
    found, problems = [], []
    for command in commands.values():
        try:
            found.append(_describe(command))
        except NoNativeLibrary as error:
            problems.append(str(error))
    if found:
        return found
    raise NoNativeLibrary(
        " ".join(problems)
        or f"A C compiler is needed; there is no {', '.join(_NAMES)} in PATH. Install gcc, or the Python package ziglang."
    )


def find_zig() -> Compiler | None:
    """The compiler of the Python package ziglang, which compiles for every CPU."""
    return None if (zig := _zig_of_python()) is None else _describe((str(zig), "cc"))


def compile_step(
    compiler: Compiler,
    number_type: NumberType,
    output: Path,
    target: Sequence[str] | None = None,
    limit_s: float | None = None,
    with_tiles: bool = True,
) -> None:
    """Compile the step into the shared library `output`; compilers' temporary files get into its folder. `target`, with_tiles: as
    for flags. `limit_s`: seconds, if not those of a worker's start.

    Raises NoNativeLibrary. OSError: the folder cannot be written.
    """
    limit_s = limit_s or _COMPILE_LIMIT_S
    folder = str(output.parent)
    command = (
        *compiler.command,
        *compiler.flags(number_type, target, with_tiles),
        str(SOURCE_DIR / "step.c"),
        "-o",
        str(output),
        "-lm",
    )
    temporary = {"TMPDIR": folder, "ZIG_GLOBAL_CACHE_DIR": f"{folder}/zig", "ZIG_LOCAL_CACHE_DIR": f"{folder}/zig"}
    finished = run_command(command, limit_s, temporary)
    change = "Set CC to another C compiler, or install gcc."
    if finished.status is None:
        raise NoNativeLibrary(f"{compiler.name} compiled for more than {limit_s:.0f} s and was ended. {change}")
    if finished.status != 0:
        raise NoNativeLibrary(
            f"{compiler.name} cannot compile {SOURCE_DIR / 'step.c'}: {_reason(finished)} {change}",
        )
    if not output.is_file():
        raise NoNativeLibrary(f"{compiler.name} ended without an error and without a file. {change}")


def run_command(command: Sequence[str], limit_s: float, variables: dict[str, str] | None = None) -> Finished:
    """Run a command in a session of its own, without input, for at most limit_s.

    `variables` are added to the environment. Raises OSError if it cannot be started.
    """
    # No pipe: a child that left the session would keep it open. No file: there may be no folder for it.
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", **(variables or {})},
            start_new_session=True,
        )
        status: int | None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Finished(status, output.read(1 << 20).decode(errors="replace"))


def one_line(text: str) -> str:
    """Printable, and of a length for a log line."""
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    return line if len(line) <= 300 else f"{line[:299]}…"


def _zig_of_python() -> Path | None:
    """The program that `python -m ziglang` runs."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (program := Path(folder) / "zig").is_file():
            return program
    return None


def _given_compiler(given: str) -> Compiler:
    try:
        program, *arguments = shlex.split(given)
    except ValueError as error:
        raise NoNativeLibrary(
            f"CC must be a C compiler's command; {one_line(given)!r} is none: {error}. Correct or unset CC."
        ) from error
    path = shutil.which(program)
    if path is None:
        raise NoNativeLibrary(
            f"CC must be a C compiler's command; there is no {one_line(program)!r}. Correct or unset CC."
        )
    return _describe((os.path.abspath(path), *arguments))


def _describe(command: tuple[str, ...]) -> Compiler:
    shown = one_line(shlex.join(command))
    try:
        finished = run_command((*command, "--version"), _VERSION_LIMIT_S)
    except OSError as error:
        raise NoNativeLibrary(f"{shown} cannot be started: {error.strerror}. Set CC to another C compiler.") from error
    if finished.status is None:
        raise NoNativeLibrary(
            f"{shown} --version took more than {_VERSION_LIMIT_S:.0f} s. Set CC to another C compiler."
        )
    if finished.status != 0:
        raise NoNativeLibrary(f"{shown} --version failed: {_reason(finished)} Set CC to another C compiler.")
    is_zig = Path(command[0]).name == "zig" or "ziglang" in command  # python -m ziglang cc
    number = re.search(r"\d+(\.\d+)+", finished.output)
    name = "zig cc, clang" if is_zig else one_line(Path(command[0]).name)
    return Compiler(command, f"{name} {number[0]}" if number else name, finished.output, is_zig)


def _reason(finished: Finished) -> str:
    """Why a command failed, as it says."""
    if finished.status is not None and finished.status < 0:
        return f"ended by signal {-finished.status}."
    lines = [line for line in finished.output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    shown = one_line((errors or lines[-1:] or ["no output"])[0]).rstrip(".")
    return f"exit status {finished.status}: {shown}."
