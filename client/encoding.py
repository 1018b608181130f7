"""Tokenises texts off the event loop, long ones one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

LONG_CHARACTERS: Final = 1 << 18
"""A text of this length takes a noticeable part of a second and a hundred times its size in memory."""
T = TypeVar("T")


class Encoding:
    """Encodes all prompts of a client. A long one waits for the long ones before it, short ones do not wait."""

    def __init__(self) -> None:
        self._long = asyncio.Lock()

    async def run(self, num_characters: int, encode: Callable[[], T]) -> T:
        """Run `encode`, which may block, in a thread, and return its result. `num_characters`: length of the text that it reads."""
        if num_characters < LONG_CHARACTERS:
            return await asyncio.to_thread(encode)
        await self._long.acquire()
        working = asyncio.get_running_loop().run_in_executor(None, encode)
        # A thread goes on if its caller leaves, and takes its memory until it has ended.
        working.add_done_callback(self._on_done)
        return await asyncio.shield(working)

    def _on_done(self, working: asyncio.Future[Any]) -> None:
        self._long.release()
        if not working.cancelled():
            working.exception()  # read here too, for a caller that has left


def num_characters(value: Any) -> int:
    """Count the characters of all texts in a prompt or in messages."""
    count, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            count += len(item)
        elif isinstance(item, dict):
            left += item.keys()
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return count
