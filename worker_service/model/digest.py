"""SHA-256 of large files, remembered on disk so that each version of a file is read once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .cache_dir import write_atomically


def file_digest(path: Path, cache_dir: Path) -> str:
    """Hex SHA-256 of the file. A file with known path, size and modification time (ns) is not read again."""
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
