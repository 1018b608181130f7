"""Import this first in a program: until the program has set its own handlers, a signal ends it without a traceback."""

from __future__ import annotations

from .signals import exit_quietly

exit_quietly()
