"""Ends a process on a signal with status 130 (SIGINT) or 0 (SIGTERM), even before it has started.

This module imports next to nothing, so that a program can call `exit_quietly` before its other imports, which take up to seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

INTERRUPTED: Final = 130
"""Exit status after SIGINT, as in shells: 128 + 2."""


def exit_status(number: int) -> int:
    """Return the exit status of a process that ends in order after a signal."""
    return INTERRUPTED if number == signal.SIGINT else 0


def exit_quietly() -> None:
    """Make SIGINT and SIGTERM end the process at once, without a traceback: there is nothing to clean up yet. A signal that is
    ignored, like SIGINT in the background of a script, stays ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os._exit(exit_status(number)))


def exit_in_order() -> None:
    """Make SIGINT raise KeyboardInterrupt and SIGTERM SystemExit(0), so that open things are closed."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(exit_status(number)))
