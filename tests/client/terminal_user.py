"""A person at a pseudo-terminal, who presses keys and reads what is on the screen."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_WAIT_SECONDS = 60.0
_TAKE_TERMINAL = 'exec 0<>"$0" 1>&0 2>&0; exec "$@"'
"""The first of a session that opens a terminal has it as its own. Not by code of ours between fork and exec, which may wait for
ever for a lock that another thread of this process had."""


class TerminalUser:
    """A Python program on a pseudo-terminal of its own, which stays open after the program has ended."""

    def __init__(self, code: str, columns: int, rows: int) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.output = b""
        self.process = subprocess.Popen(
            ["sh", "-c", _TAKE_TERMINAL, os.ttyname(self._slave), sys.executable, "-c", code],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color"},
        )

    def settings(self) -> list[object]:
        """The terminal's modes and special characters."""
        return termios.tcgetattr(self._slave)

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        """Wait for the process; its exit status, negative for a signal."""
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.02)[0]:
                self.output += os.read(self._master, 65536)
        while select.select([self._master], [], [], 0)[0]:
            self.output += os.read(self._master, 65536)
        return self.process.wait(0.1)

    def leave(self) -> None:
        """Kill the process if it still runs, and close the window."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def at_terminal(*, code: str, columns: int, rows: int) -> Iterator[TerminalUser]:
    """A Python program before somebody's eyes."""
    user = TerminalUser(code, columns, rows)
    try:
        yield user
    finally:
        user.leave()
