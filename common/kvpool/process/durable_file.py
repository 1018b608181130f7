"""Replaces a small file as a whole, so that its new content survives a loss of power."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def write_durably(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of the file. At every moment, also after a crash, the file has its old content or the new one; after the
    return it has the new one. `mode` is the mode of a new file before the umask.

    A crash may leave `path` + ".tmp" with any content; the next call overwrites it. Only one caller at a time. Blocks. Raises
    OSError: until the rename has succeeded the file has its old content, after it the new content may not be durable.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb", opener=functools.partial(os.open, mode=mode)) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    # The rename is in the directory, which is written in its own time.
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
