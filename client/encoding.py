"""Where texts become token ids: off the event loop, and long ones one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

LONG_CHARACTERS: Final = 1 << 18
"""From here on a text takes a noticeable part of a second and a hundred times its size in memory."""
T = TypeVar("T")


class Encoding:
    """One for all prompts of a client. A long one waits for those before it, short ones for none."""

    def __init__(self) -> None:
        self._long = asyncio.Lock()

    async def run(self, num_characters: int, encode: Callable[[], T]) -> T:
        """What `encode` returns, which may block. `num_characters`: of what it reads."""
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
    """Of all text in a prompt, or in messages."""
    count, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return count
