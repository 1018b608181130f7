"""How much of a busy CPU the forward pass gets."""

from __future__ import annotations

import os
import sys
import threading


def stand_back(nice: int) -> None:
    """From here on this thread, and those that it starts, get less of a CPU that others want too, as by nice(1).

    A forward pass uses all that there is, for seconds without a pause; heartbeats, streams and a manager that starts again need
    little of it, but at once. Threads have priorities of their own on Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
