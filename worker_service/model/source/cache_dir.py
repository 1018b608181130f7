"""The cache folder of a worker, for results that are expensive to compute."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ModelError

_LAYOUT = "3"
"""Part of a conversion's name: a conversion that writes something else gets a new one."""


def default_cache_dir() -> Path:
    """$KVPOOL_CACHE_DIR, else kvpool in the XDG cache folder."""
    if given := os.environ.get("KVPOOL_CACHE_DIR"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpool"


def open_cache_dir(given: Path | None) -> Path:
    """The cache folder, `given` or the default, made if it is missing. Raises ModelError if that is not possible."""
    folder = given or default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"The cache folder {folder} cannot be made: {error.strerror}. Give another --cache-dir or KVPOOL_CACHE_DIR."
        ) from error
    return folder


@contextmanager
def locked(lock_file: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; blocks until it is free. It is released when the process ends."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the whole file: readers get the old content or the new one. Safe if several processes write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the process id in its name: in containers that share this folder all workers have the same one.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp", delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def file_digest(path: Path, cache_dir: Path) -> str:
    """Hex SHA-256 of the file. A file with known path, size and modification time (ns) is not read again."""
    if (cached := known_digest(path, cache_dir)) is not None:
        return cached
    version = _version(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_atomically(_record(version, cache_dir), json.dumps({**version, "sha256": digest}).encode())
    return digest


def known_digest(path: Path, cache_dir: Path) -> str | None:
    """The digest of the file if the cache has it, else None; reads no more of the file than its size and time, and writes
    nothing."""
    version = _version(path)
    try:
        cached = json.loads(_record(version, cache_dir).read_bytes())
    except (OSError, ValueError):
        return None
    is_same = isinstance(cached, dict) and all(cached.get(key) == value for key, value in version.items())
    return str(cached["sha256"]) if is_same and "sha256" in cached else None


def conversion_folder(gguf: Path, digest: str, cache_dir: Path) -> Path:
    """The folder of the conversion of a GGUF file with this digest; it exists once the conversion is complete."""
    return cache_dir / "models" / f"{gguf.stem}-{digest[:16]}-{_LAYOUT}"


def _version(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"path": str(path.resolve()), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _record(version: dict[str, Any], cache_dir: Path) -> Path:
    name = hashlib.sha256(version["path"].encode()).hexdigest()[:32]
    return cache_dir / "digests" / f"{name}.json"
