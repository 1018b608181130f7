"""The forward pass's share of a busy CPU."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

SPIN_COUNT: Final = "30000"
"""CPU pauses of about 40 ns: in all longer than the gap between two products of a step, shorter than the gap between steps."""


def lower_priority(nice: int) -> None:
    """Raise the nice value of this thread, and of those that it starts, to at least `nice`.

    A forward pass uses the whole CPU for seconds without a pause; heartbeats, streams and a restarting manager need little of it,
    but at once. Only on Linux do threads have priorities of their own; on other systems this has no effect.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


def spin_between_products() -> None:
    """Let threads that wait for the next product of a step spin for about a millisecond before they sleep.

    Call it before torch is imported: GNU's OpenMP, which torch uses on Linux, reads the variable when its library is loaded. Waking
    a thread takes longer than a product of a small model, so without it a second thread helps little; but a thread that spins on
    a core that another one needs delays all. A value in the environment takes precedence.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
