"""Collects garbage in the manager's process, where automatic collection is off."""

from __future__ import annotations

import gc


def collect_young() -> None:
    """Free the reference cycles made since the last call, where automatic collection is off.

    Our code makes none, but grpc.aio leaves some five objects per call. Only objects younger than the last call of this function
    are visited, so the pause does not grow with the prefix tree, which is why automatic collection is off.
    """
    if not gc.isenabled():
        gc.collect(0)
