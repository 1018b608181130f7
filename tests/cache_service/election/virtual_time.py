"""An event loop whose clock jumps to the next timer when nothing else is to be done: minutes of leases pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jump(selectors.SelectSelector):
    """Waits for nothing: it moves the clock by what it should have waited."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(None)
        if not ready and timeout:
            self._loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now
