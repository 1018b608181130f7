"""Waiting for what happens in this process, or can be seen from it without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], *, pause: float = 0.001, seconds: float = 40.0) -> None:
    """Poll until the condition holds, every `pause` seconds; 0 after each turn of the event loop, for what does not last.

    Raises TimeoutError after `seconds`.
    """
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(pause)
