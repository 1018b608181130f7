"""Waiting for what can be seen from this process without waiting (`until`), and for what has to be asked for (`eventually`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Found = TypeVar("Found")


async def until(condition: Callable[[], object], *, pause: float = 0.001, seconds: float = 40.0) -> None:
    """Poll until the condition holds, every `pause` seconds; 0 after each turn of the event loop, for what does not last.

    Raises TimeoutError after `seconds`.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(pause)


async def eventually(check: Callable[[], Awaitable[Found | None]], what: str, seconds: float = 30.0) -> Found:
    """What `check` returns once that is true. AssertionError, which names `what`, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = await check()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(0.02)
