"""A process that gets work over a pipe, and can be killed and restarted at any time."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Serve = Callable[["Connection[Any, Any]"], None]
"""A function of a module: receives until EOFError, then returns."""


class ChildProcess:
    """Starts at once. The kernel kills it when its parent ends in any way."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # No daemon: daemons may not have children, and cases start whole clusters.
        self._process = context.Process(target=_run, args=(self._serve, theirs, os.getpid()))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def status(self) -> int | None:
        """Waits for its end; returns its exit status, −n after signal n."""
        self._process.join()
        return self._process.exitcode

    def restart(self) -> None:
        """Kill it and start a new one."""
        self.close()
        self._begin()

    def close(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _run(serve: Serve, connection: Connection[Any, Any], parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            return
    serve(connection)
