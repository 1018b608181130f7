"""Waiting for what another process does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Found = TypeVar("Found")


async def eventually(check: Callable[[], Awaitable[Found | None]], what: str, seconds: float = 30.0) -> Found:
    """What `check` returns once that is true. AssertionError, which names `what`, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        found = await check()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(0.02)
