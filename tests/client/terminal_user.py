"""Somebody at a pseudo-terminal: presses keys and reads what is on the screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SHOW, HIDE = b"\x1b[?1049h\x1b[?25l", b"\x1b[?25h\x1b[?1049l"
_BEGIN_FRAME, _END_FRAME = b"\x1b[?2026h\x1b[H", b"\x1b[?2026l"
_LONGEST_WAIT_SECONDS = 60.0
_TAKE_TERMINAL = 'exec 0<>"$0" 1>&0 2>&0; exec "$@"'
"""The first of a session that opens a terminal has it as its own. Not by code of ours between fork and exec, which may wait for
ever for a lock that another thread of this process had."""


class TerminalUser:
    """A process on a pseudo-terminal of its own, which stays open after the process has ended."""

    def __init__(
        self, command: list[str], columns: int, rows: int, *, controlling: bool, environment: dict[str, str]
    ) -> None:
        self._master, self._slave = os.openpty()
        self.resize(columns, rows)
        self.settings_before = self.settings()
        self.output = b""
        # A session of its own has the terminal's size changes and its end sent to it, but cannot be stopped by Ctrl-Z.
        if controlling:
            command = ["sh", "-c", _TAKE_TERMINAL, os.ttyname(self._slave), *command]
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=controlling,
            process_group=None if controlling else 0,
            env=os.environ | {"TERM": "xterm-256color"} | environment,
        )

    def settings(self) -> list[object]:
        """The terminal's modes and special characters."""
        return termios.tcgetattr(self._slave)

    def resize(self, columns: int, rows: int) -> None:
        """As if the window were dragged."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def hang_up(self) -> None:
        """Close the window."""
        for fd in (self._master, self._slave):
            with suppress(OSError):
                os.close(fd)

    @property
    def frames(self) -> list[bytes]:
        """All whole pictures so far, with their escape codes."""
        pieces = (piece.partition(_END_FRAME) for piece in self.output.split(_BEGIN_FRAME)[1:])
        return [frame for frame, end, _ in pieces if end]

    @property
    def screen(self) -> str:
        """The last whole picture, without its escape codes; "" before the first."""
        frames = self.frames
        if not frames:
            return ""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames[-1].decode()).replace("\r\n", "\n")

    def read_until(self, *words: str, raw: bytes = b"") -> str:
        """Read until the screen has all the words, and the output `raw` in it."""
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while raw not in self.output or not all(word in self.screen for word in words):
            if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"never saw {words} {raw!r}; the last screen:\n{self.screen}")
            self.output += os.read(self._master, 65536)
        return self.screen

    def end(self) -> int:
        """Wait for the process; its exit status, negative for a signal."""
        deadline = time.monotonic() + _LONGEST_WAIT_SECONDS
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.02)[0]:
                self.output += os.read(self._master, 65536)
        while select.select([self._master], [], [], 0)[0]:
            self.output += os.read(self._master, 65536)
        return self.process.wait(0.1)


@contextmanager
def at_terminal(
    *arguments: str,
    columns: int = 100,
    rows: int = 50,
    code: str = "",
    controlling: bool = True,
    environment: dict[str, str] | None = None,
) -> Iterator[TerminalUser]:
    """`kvpool walkthrough` with these arguments, or some other Python code, before somebody's eyes."""
    program = ["-c", code] if code else ["-m", "kvpool.walkthrough", *arguments]
    command = [sys.executable, *program]
    user = TerminalUser(command, columns, rows, controlling=controlling, environment=environment or {})
    try:
        yield user
    finally:
        if user.process.poll() is None:
            user.process.send_signal(signal.SIGKILL)
            user.process.wait(10)
        user.hang_up()
