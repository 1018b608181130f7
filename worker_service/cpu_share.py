"""The forward pass's share of a busy CPU, and of the interpreter."""

from __future__ import annotations

import os
import sys
import threading

SWITCH_SECONDS = 0.0002
"""Python's default is 5 ms. If one thread delivers tokens for 2 ms, another one that launches the next step meanwhile waits for all
of them; with this it has begun to compute after 0.5 ms. The delivery takes a sixth longer."""


def switch_threads_soon() -> None:
    """Let a thread of this process that waits for the interpreter have it after SWITCH_SECONDS at the latest."""
    sys.setswitchinterval(SWITCH_SECONDS)


def lower_priority(nice: int) -> None:
    """Raise the nice value of this thread, and of those that it starts, to at least `nice`.

    A forward pass uses the whole CPU for seconds without a pause; heartbeats, streams and a restarting manager need little of it,
    but at once. Only on Linux do threads have priorities of their own; on other systems this has no effect.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
