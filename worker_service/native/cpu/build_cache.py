"""Steps compiled here: once per source, flags, compiler and CPU, tried in another process, and kept in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from . import cpu_info
from .build_lock import build_lock
from .compiler import (
    Compiler,
    NoNativeLibrary,
    NumberType,
    compile_step,
    find_compilers,
    given_command,
    one_line,
    source_digest,
)
from .library import Library, LibraryMismatch, open_library
from .trial import why_it_does_not_run
from .trusted_folder import NotTrusted, read_trusted, trusted_folder

_ABANDONED_S = 3600.0
"""More than all limits of a build together."""
_TILE_FLAGS = frozenset({"amx_tile", "amx_bf16"})
"""Of a CPU with which bfloat16 is multiplied in tile registers."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class _Way:
    """To compile the step."""

    compiler: Compiler
    number_type: NumberType
    with_tiles: bool

    @property
    def file_name(self) -> str:
        """Names all that the file depends on."""
        flags = self.compiler.flags(self.number_type, with_tiles=self.with_tiles)
        return f"{_kind(self.number_type)}-{_digest(flags, self.compiler.command, self.compiler.version)}.so"

    @property
    def origin(self) -> str:
        return f"compiled by {self.compiler.name}"


def compiled_library(number_type: NumberType, cache_dir: Path, progress: Callable[[str], None]) -> Library:
    """The step for this number type: from the cache folder, else compiled, which takes seconds.

    Each compiler found is tried until one gives a file that runs; on a CPU with AMX first with its tile registers, which Linux or a
    container may refuse, then without. If none does, a file that a compiler of earlier gave for this source and CPU is used, unless
    $CC asks for one of now. Where the cache folder cannot be written, or others could have written it, the file is built in a
    temporary folder and not kept. Raises NoNativeLibrary, and nothing else.
    """
    try:
        try:
            return _kept_or_built(_ways(find_compilers(), number_type), cache_dir, progress)
        except NoNativeLibrary as error:
            if given_command() or (library := _kept_earlier(number_type, cache_dir)) is None:
                raise
            progress(f"{error} The step compiled earlier is used.")
            return library
    except OSError as error:
        raise NoNativeLibrary(
            f"The step cannot be compiled: {one_line(str(error))}. Give a --cache-dir or a TMPDIR that can be written."
        ) from error


def _ways(compilers: Sequence[Compiler], number_type: NumberType) -> list[_Way]:
    """In the order in which they are tried."""
    has_tiles = number_type == "bfloat16" and cpu_info.flags() >= _TILE_FLAGS
    choices = (True, False) if has_tiles else (True,)
    return [_Way(compiler, number_type, with_tiles) for compiler in compilers for with_tiles in choices]


def _kept_or_built(ways: Sequence[_Way], cache_dir: Path, progress: Callable[[str], None]) -> Library:
    folder = _trusted_folder(cache_dir, progress)

    def kept() -> Library | None:
        for way in ways:
            if folder is not None and (library := _kept_library(folder / way.file_name)) is not None:
                return replace(library, origin=way.origin)
        return None

    if (library := kept()) is not None:
        return library
    problems: dict[str, None] = {}  # in order, each once
    with nullcontext() if folder is None else build_lock(folder, progress):
        if (library := kept()) is not None:
            return library
        for way in ways:
            try:
                library = _build(way, folder, progress)
            except NoNativeLibrary as error:
                problems[str(error)] = None
                continue
            for problem in problems:
                progress(problem)
            return library
    raise NoNativeLibrary(" ".join(problems))


def _kept_earlier(number_type: NumberType, cache_dir: Path) -> Library | None:
    """The newest file of any compiler for this source and CPU."""
    if (folder := _trusted_folder(cache_dir, lambda line: None)) is None:
        return None
    files = {path: path.stat().st_mtime for path in folder.glob(f"{_kind(number_type)}-*.so")}
    for path in sorted(files, key=lambda path: files[path], reverse=True):
        if (library := _kept_library(path)) is not None:
            return replace(library, origin="compiled earlier")
    return None


def _build(way: _Way, folder: Path | None, progress: Callable[[str], None]) -> Library:
    """Compile, try, and keep in the folder, if there is one."""
    compiler, number_type = way.compiler, way.number_type
    work, is_kept = _work_folder(folder, progress)
    with work:
        file = Path(work.name) / way.file_name
        started = time.monotonic()
        progress(f"compiling the {number_type} step with {compiler.name}: a few seconds")
        compile_step(compiler, number_type, file, with_tiles=way.with_tiles)
        _seal(file)
        if problem := why_it_does_not_run(file):
            raise NoNativeLibrary(
                f"The step that {compiler.name} compiled does not run here: {problem}. Set CC to another C compiler, "
                "or give a --cache-dir from which programs may be run."
            )
        progress(f"compiled the {number_type} step in {time.monotonic() - started:.1f} s")
        try:
            # By a path that was never loaded before: the loader takes a known path for the file that it has.
            library = open_library(file)
        except (OSError, LibraryMismatch) as error:
            raise NoNativeLibrary(
                f"The step that {compiler.name} compiled cannot be loaded: {one_line(str(error))}."
            ) from error
        if folder is not None and is_kept:
            # Another process may have done the same without the lock: both files are whole, and one of them stays.
            library = replace(library, path=file.replace(folder / way.file_name))
        return replace(library, origin=way.origin)  # its file may go: it stays in memory


def _work_folder(folder: Path | None, progress: Callable[[str], None]) -> tuple[tempfile.TemporaryDirectory[str], bool]:
    """A new folder that only this user can enter, and whether it is in `folder`; else it is where temporary files are."""
    if folder is not None:
        _remove_abandoned(folder)
        try:
            return tempfile.TemporaryDirectory(prefix="build-", dir=folder, ignore_cleanup_errors=True), True
        except OSError as error:
            _will_not_be_kept(f"{folder} cannot be written: {error.strerror}", progress)
    return tempfile.TemporaryDirectory(prefix="kvpool-native-", ignore_cleanup_errors=True), False


def _remove_abandoned(folder: Path) -> None:
    """Work folders of processes that were killed while they compiled."""
    for path in folder.glob("build-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path)


def _kept_library(path: Path) -> Library | None:
    """From the cache; None if it is not there, not whole, not safe to load, or from another version of the library; or if Linux
    refuses its tile registers now, as another container on the same machine may."""
    try:
        content = read_trusted(path)
        if content is None or not _is_whole(content):
            return None
        library = open_library(path)
        return None if library.has_tiles and why_it_does_not_run(path) else library
    except (OSError, LibraryMismatch):
        return None


def _seal(file: Path) -> None:
    """Append the file's SHA-256. A loaded file that is shorter than it says ends the process that reads beyond its end."""
    content = file.read_bytes()
    with file.open("ab") as opened:
        opened.write(hashlib.sha256(content).digest())
        opened.flush()
        os.fsync(opened.fileno())
    file.chmod(0o600)


def _is_whole(content: bytes) -> bool:
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _trusted_folder(cache_dir: Path, progress: Callable[[str], None]) -> Path | None:
    """Of compiled files; None with a line to progress if it cannot be used."""
    try:
        return trusted_folder(cache_dir)
    except NotTrusted as problem:
        _will_not_be_kept(str(problem), progress)
        return None


def _will_not_be_kept(why: str, progress: Callable[[str], None]) -> None:
    progress(
        f"the compiled step is not kept, each start compiles it: {why}. Give another --cache-dir, or mend this one."
    )


def _kind(number_type: NumberType) -> str:
    """The part of a file's name that does not depend on the compiler."""
    return f"step-{number_type}-{_digest(source_digest(), cpu_info.identity())}"


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
