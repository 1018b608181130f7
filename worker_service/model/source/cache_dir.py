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


def default_cache_dir() -> Path:
    """$KVPOOL_CACHE_DIR, else kvpool in the XDG cache folder."""
    if given := os.environ.get("KVPOOL_CACHE_DIR"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpool"


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
    """Hex SHA-256 of the file, cached by path, size and modification time (ns)."""
    stat = path.stat()
    resolved = str(path.resolve())
    version = {"path": resolved, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    name = hashlib.sha256(resolved.encode()).hexdigest()[:32]
    record = cache_dir / "digests" / f"{name}.json"
    known = _read(record)
    if known is not None and all(known.get(key) == value for key, value in version.items()):
        return str(known["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_atomically(record, json.dumps({**version, "sha256": digest}).encode())
    return digest


def _read(record: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "sha256" in content else None
