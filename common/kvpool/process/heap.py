"""Gives memory that large requests have used back to the system.

glibc keeps freed memory for the next allocation: once a block of 16 MiB has been freed, up to 32 MiB in each of its arenas. After a
few large requests on different threads, a process would be a hundred megabytes larger for ever."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 1 << 20
"""Size of a request after which memory is given back."""
DELAY_SECONDS: Final = 1.0
"""Time until then, in which the request's memory is freed, and that of later ones too."""


_trim: Final[Callable[[int], int] | None] = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's own; None: this is another library."""


class Heap:
    """Gives freed memory back, at most once within DELAY_SECONDS. Use it in one event loop."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def after_request(self, num_bytes: int) -> None:
        """Note that a request of this size has come."""
        if num_bytes >= LARGE_BYTES and self._due is None and _trim is not None:
            self._due = asyncio.get_running_loop().call_later(DELAY_SECONDS, self._release)

    def _release(self) -> None:
        self._due = None
        if _trim is not None:
            # In a thread, because it takes milliseconds; ctypes lets go of the GIL.
            asyncio.get_running_loop().run_in_executor(None, _trim, 0)
