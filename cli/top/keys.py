"""Reads keys as they are pressed, and restores the terminal."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import termios
import tty
from typing import Any, Final, Self

UP: Final = "up"
DOWN: Final = "down"
_NAMES: Final = {"\x1b[A": UP, "\x1b[B": DOWN, "\x1bOA": UP, "\x1bOB": DOWN}
_KEY: Final = re.compile(r"\x1b[\[O][0-?]*[ -/]*[@-~]|.", re.DOTALL)
"""Pattern of one key: an escape sequence (ECMA-48, 5.4), or a character."""
_READ_BYTES: Final = 1024


class KeyReader:
    """Reads keys. Use it as `with KeyReader() as keys` inside an event loop: `await keys.next()` is the next key, a character or
    one of the names above.

    Ctrl-C still interrupts. If stdin is no terminal, no key ever comes.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue(maxsize=64)
        self._file = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
            asyncio.get_running_loop().add_reader(self._file, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            asyncio.get_running_loop().remove_reader(self._file)
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    async def next(self) -> str:
        """Wait for the next key."""
        return await self._queue.get()

    def _read(self) -> None:
        assert self._file is not None
        pressed = os.read(self._file, _READ_BYTES).decode(errors="replace")
        if not pressed:  # the terminal has gone
            asyncio.get_running_loop().remove_reader(self._file)
        for key in _KEY.findall(pressed):
            if not self._queue.full():
                self._queue.put_nowait(_NAMES.get(key, key))
