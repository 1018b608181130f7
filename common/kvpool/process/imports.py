"""Speeds up the imports at the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import without garbage collection, and leave the imported objects out of later collections.

    Importing torch and transformers makes 600,000 objects, which stay. Visiting them again and again takes a sixth of the import's
    time, and frees a few hundred.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
