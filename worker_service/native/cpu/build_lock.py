"""One process at a time compiles into a folder: the workers of a machine, started together, need the same files."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LIMIT_S = 120.0
"""As long as a compiler may run. After this the holder counts as stuck."""
_RETRY_S = 0.1


@contextmanager
def build_lock(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock, after waiting for another holder, with a line to progress, for at most _LIMIT_S.

    The lock saves work and does not protect the files, which are renamed into place. So the block runs without it if the wait takes
    too long or the file system has no locks. The lock is on the folder itself, so it leaves no file, and it ends with its process,
    whose compiler does not inherit it.
    """
    descriptor = _open(folder)
    try:
        if descriptor is not None:
            _wait(descriptor, folder, progress)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None


def _wait(descriptor: int, folder: Path, progress: Callable[[str], None]) -> None:
    started, has_reported = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                return
        if not has_reported:
            progress(f"another process compiles in {folder}: waiting for it")
            has_reported = True
        if time.monotonic() - started > _LIMIT_S:
            progress(f"another process has compiled in {folder} for more than {_LIMIT_S:.0f} s: not waiting any longer")
            return
        time.sleep(_RETRY_S)
