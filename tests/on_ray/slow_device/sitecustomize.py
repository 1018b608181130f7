"""On the import path of a node's processes: a worker there is one on a slow device (`tests/slow_worker`).

Streams then last as long as the faults do, and leave the CPU to the processes that are started again meanwhile.
"""

from __future__ import annotations

import os
import sys

_WORKER = ["-m", "kvpool.worker_service"]
_STEP_SECONDS = "0.02"

if sys.orig_argv[1:3] == _WORKER:
    os.execv(sys.executable, [sys.executable, "-m", "tests.slow_worker", _STEP_SECONDS, *sys.orig_argv[3:]])
