"""The forward pass's share of a busy CPU."""

from __future__ import annotations

import os
import sys
import threading


def lower_priority(nice: int) -> None:
    """Raise the nice value of this thread, and of those that it starts, to at least `nice`.

    A forward pass uses the whole CPU for seconds without a pause; heartbeats, streams and a restarting manager need little of it,
    but at once. Only on Linux do threads have priorities of their own; on other systems this has no effect.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
