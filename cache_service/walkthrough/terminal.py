"""A terminal in full-screen mode: keys without echo, the alternate screen, and all settings restored at the end."""

from __future__ import annotations

import os
import select
import signal
import termios
from types import FrameType
from typing import Final

from .keys import ESCAPE, Key, parse_keys

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SHOW: Final = b"\x1b[?1049h\x1b[?25l"
"""The alternate screen, and no cursor."""
_HIDE: Final = b"\x1b[?25h\x1b[?1049l"
_BEGIN_FRAME: Final = "\x1b[?2026h\x1b[H"
"""A terminal that knows the mode shows nothing until the frame ends, so that nothing flickers; others ignore it."""
_END_FRAME: Final = "\x1b[?2026l"
_ESCAPE_SECONDS: Final = 0.05
"""A terminal sends the rest of a key's sequence sooner than this; a person's Escape has no rest."""


class Ended(Exception):
    """A signal asks the process to end, or the terminal is gone (`signal_number` 0)."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class Terminal:
    """Context manager. Restores the terminal and the signal handlers however it is left."""

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._input = input_fd
        self._output = output_fd
        self._pending = b""

    def __enter__(self) -> Terminal:
        self._saved = termios.tcgetattr(self._input)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        # Signals only write a byte, which `read_keys` finds: nothing is interrupted half done, restoring least of all.
        self._old_wake = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in (*_ENDING, signal.SIGWINCH)}
        try:
            self._take()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._old_wake)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def size(self) -> os.terminal_size:
        """Columns and lines now."""
        size = os.get_terminal_size(self._output)
        return size if size.columns and size.lines else os.terminal_size((80, 24))

    def show(self, lines: list[str]) -> None:
        """Replace what is on the screen."""
        # Each line is erased before it is written: erasing after one that fills the width would erase its last sign.
        picture = "\n".join(f"\x1b[K{line}" for line in lines)
        self._write(f"{_BEGIN_FRAME}{picture}{_END_FRAME}".encode())

    def read_keys(self) -> list[Key]:
        """Wait for keys; an empty list if the terminal's size has changed. Raises Ended."""
        while True:
            timeout = _ESCAPE_SECONDS if self._pending else None
            ready, _, _ = select.select([self._input, self._wake_read], [], [], timeout)
            if self._wake_read in ready:
                for number in os.read(self._wake_read, 4096):
                    if number in _ENDING:
                        raise Ended(number)
                return []
            if not ready:
                # No more came: it was the key itself, or a sequence that means nothing here.
                keys = [Key.QUIT] if self._pending == ESCAPE else []
                self._pending = b""
                return keys
            data = self._read()
            if not data:
                raise Ended(0)
            keys, self._pending = parse_keys(self._pending + data)
            if keys:
                return keys

    def suspend(self) -> None:
        """Stop the process as Ctrl-Z does, with the terminal given back meanwhile."""
        self._give_back()
        os.kill(0, signal.SIGTSTP)
        self._take()

    def _take(self) -> None:
        settings = termios.tcgetattr(self._input)
        # Ctrl-C and Ctrl-Z come as keys; output is processed as before, so that a newline begins a line.
        settings[3] &= ~(termios.ECHO | termios.ICANON | termios.ISIG | termios.IEXTEN)
        settings[6][termios.VMIN], settings[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self._input, termios.TCSADRAIN, settings)
        self._write(_SHOW)

    def _give_back(self) -> None:
        try:
            self._write(_HIDE)
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._saved)
        except (OSError, termios.error):
            pass  # The terminal is gone: there is nothing to restore.

    def _read(self) -> bytes:
        try:
            return os.read(self._input, 4096)
        except OSError:
            return b""  # The other side of the terminal was closed.

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]


def _ignore(number: int, frame: FrameType | None) -> None:
    """The byte in the pipe is what counts."""
