"""The folder on disk where a worker keeps what is expensive to make again."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def default_cache_dir() -> Path:
    """$KVPOOL_CACHE_DIR, else kvpool in the XDG cache folder."""
    if given := os.environ.get("KVPOOL_CACHE_DIR"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpool"


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; waits for it. The lock ends with the process that holds it."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the file as a whole: readers see the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
