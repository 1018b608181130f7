"""A process that is served work over a pipe, and can be ended and started again at any moment."""

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
    """Starts at once. The kernel ends it when the process that made it ends, however that happens."""

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
        """Its exit status, −n after signal n; waits for its end, which must be near."""
        self._process.join()
        return self._process.exitcode

    def restart(self) -> None:
        """End it and start a new one."""
        self.close()
        self._begin()

    def close(self) -> None:
        """End it at once and wait until it is gone."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _run(serve: Serve, connection: Connection[Any, Any], parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            return
    serve(connection)
