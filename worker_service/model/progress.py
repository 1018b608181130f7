"""Progress lines of long operations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]
"""Takes one line of text. May be called from another thread."""


@contextmanager
def heartbeat(progress: Progress, what: str, interval_s: float = 5.0) -> Iterator[None]:
    """Pass on a line every interval_s seconds while the body runs."""
    started, done = time.monotonic(), threading.Event()

    def beat() -> None:
        while not done.wait(interval_s):
            progress(f"{what}: {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show no progress bars of transformers inside."""
    # Here and not above: a model that is not there is reported without waiting for this import.
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
