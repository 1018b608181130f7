"""Somebody at a pseudo-terminal: presses keys and reads what is on the screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

_PICTURE = b"\x1b[H"
"""How each picture begins, at the upper left corner."""
_LONGEST_WAIT_SECONDS = 60.0
_TAKE_TERMINAL = 'exec 0<>"$0" 1>&0 2>&0; exec "$@"'
"""The first of a session that opens a terminal has it as its own. Not by code of ours between fork and exec, which may wait for
ever for a lock that another thread of this process had."""


class TerminalUser:
    """A process that has a pseudo-terminal of its own, which stays open after the process has ended."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, terminal: str) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = b""
        self.process = subprocess.Popen(
            ["sh", "-c", _TAKE_TERMINAL, os.ttyname(self._slave), *command],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            env=os.environ | {"TERM": terminal},
        )

    def settings(self) -> list[object]:
        """The terminal's modes and special characters."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def see(self, is_there: Callable[[str], bool]) -> str:
        """Read until the last picture is as wanted; returns it without its escape codes."""
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while True:
            last = self.output.rpartition(_PICTURE)[2].decode(errors="replace")
            screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last)
            if is_there(screen):
                return screen
            assert time.monotonic() < deadline, screen
            self._read(0.1)

    def end(self) -> int:
        """Wait for the process; its exit status, negative for a signal."""
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.02)
        while self._read(0):
            pass
        return self.process.wait(0.1)

    def close(self) -> None:
        """Kill the process if it still runs, and close the window."""
        self.process.kill()
        self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)

    def _read(self, seconds: float) -> bool:
        """Whether something came within the time."""
        is_there = bool(select.select([self._master], [], [], seconds)[0])
        if is_there:
            self.output += os.read(self._master, 65536)
        return is_there


@contextmanager
def at_terminal(
    *arguments: str, columns: int = 100, rows: int = 30, terminal: str = "xterm-256color"
) -> Iterator[TerminalUser]:
    """`python ARGUMENT…` before somebody's eyes."""
    user = TerminalUser([sys.executable, *arguments], columns, rows, terminal)
    try:
        yield user
    finally:
        user.close()
