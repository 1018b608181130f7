"""The tests of leases run in virtual time: on an event loop whose clock jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from typing import Any

import pytest


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


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    return (
        {"virtual": VirtualLoop} if item.path.name == "test_kubernetes_lease.py" else {"real": asyncio.new_event_loop}
    )
