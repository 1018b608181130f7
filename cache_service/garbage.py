"""Garbage of the manager's process, where automatic collection is off."""

from __future__ import annotations

import gc


def collect_young() -> None:
    """Free the reference cycles made since the last call, where automatic collection is off.

    Our code makes none, but grpc.aio leaves some five objects per call behind. Only objects younger than the last call are
    looked at, so the pause does not grow with the prefix tree: that is what automatic collection was switched off for.
    """
    if not gc.isenabled():
        gc.collect(0)
