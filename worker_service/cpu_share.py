"""How much of a busy CPU the forward pass gets."""

from __future__ import annotations

import os
import sys
import threading
from typing import Final

SPIN_COUNT: Final = "30000"
"""Each a pause of the CPU, some 40 ns: longer than what lies between two products of a step, shorter than an idle worker's rest."""


def stand_back(nice: int) -> None:
    """From here on this thread, and those that it starts, get less of a CPU that others want too, as by nice(1).

    A forward pass uses all that there is, for seconds without a pause; heartbeats, streams and a manager that starts again need
    little of it, but at once. Threads have priorities of their own on Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


def spin_between_products() -> None:
    """Let threads that wait for the next product of a step spin for about a millisecond before they sleep.

    Must come before torch is imported: GNU's OpenMP, which torch has on Linux, reads it when its library is loaded. Waking a thread
    takes longer than a product of a small model does, so a step has little of its second thread without it; but a thread that
    spins on a core that another one needs holds all of them up. What the environment says already stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
