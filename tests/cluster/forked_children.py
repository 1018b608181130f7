"""Services that `kvpool up` and its like start as child processes, started by the tests' fork server instead.

For tests in which it does not matter whose children they are. Flags and variables are the same but for those of the process itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvpool.cli.launch.children import ChildSpec
from tests.cluster.fork_server import MANAGER_MODULE, WORKER_MODULE, ForkedProcess
from tests.cluster.process import Process


class ForkedChild:
    """What `Children` needs of an asyncio.subprocess.Process."""

    def __init__(self, process: ForkedProcess, stdout: asyncio.StreamReader) -> None:
        self.stdout, self.stderr = stdout, None
        self.pid = process.pid
        self._process = process

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            await asyncio.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        self._process.send_signal(signal.Signals(number))


@contextmanager
def forked_children() -> Iterator[None]:
    """Meanwhile managers and workers are forked, but for dry runs, whose first line comes before they would import torch."""
    real = ChildSpec.start
    with tempfile.TemporaryDirectory() as folder:

        async def start(spec: ChildSpec, *, stderr: int) -> Any:
            server, command = Process.fork_server, list(spec.command)
            assert server is not None
            module, *arguments = command[command.index("-m") + 1 :] if "-m" in command else [""]
            if module not in (MANAGER_MODULE, WORKER_MODULE) or "--dry-run" in arguments:
                return await real(spec, stderr=stderr)
            pipe = _new_pipe(Path(folder, spec.name))
            reader = asyncio.StreamReader()
            file = os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
            return ForkedChild(server.start(module, arguments, pipe), reader)

        with mock.patch.object(ChildSpec, "start", start):
            yield


def _new_pipe(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path
