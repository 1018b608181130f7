"""Managers on this machine for a benchmark: one, or two of which one leads."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc

from kvpool.process.manager_channel import ManagerChannel
from kvpool.v1 import cache_pb2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Managers:
    """Processes by port, with `--election file` if there are several. `flags`: further ones of each."""

    def __init__(self, state_dir: Path, num_managers: int, flags: tuple[str, ...] = ()) -> None:
        self._state_dir = state_dir
        self._flags = (*flags, *(("--election", "file") if num_managers > 1 else ()))
        self._ports = [_free_port() for _ in range(num_managers)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for port in self._ports:
            self.start(port)

    @property
    def addresses(self) -> str:
        """Of all, as `--manager` takes them."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def start(self, port: int) -> None:
        """Start one, or start it again."""
        command = [
            sys.executable,
            "-m",
            "kvpool.cache_service",
            "--port",
            str(port),
            "--state-dir",
            str(self._state_dir),
        ]
        self._running[port] = subprocess.Popen([*command, *self._flags, "--log-level", "error"])

    def end(self, port: int, number: int) -> None:
        """Send a signal that ends one."""
        self._running[port].send_signal(number)

    async def restart(self, port: int) -> None:
        """Start one again as soon as it has ended."""
        await asyncio.to_thread(self._running[port].wait)
        self.start(port)

    def leader(self) -> int:
        """By the lock file, which has the process id."""
        pid = self.leader_pid()
        return next(port for port, process in self._running.items() if process.pid == pid)

    def leader_pid(self) -> int:
        """Of the process that has the lock."""
        return int((self._state_dir / "lock").read_text())

    def close(self) -> None:
        """End all."""
        for process in self._running.values():
            process.kill()
            process.wait()


@asynccontextmanager
async def managers(num_managers: int, *flags: str) -> AsyncIterator[Managers]:
    """As long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        running = Managers(Path(folder), num_managers, flags)
        try:
            yield running
        finally:
            running.close()


async def ask_epoch(channel: ManagerChannel, seconds: float) -> int:
    """That of the manager that answers."""
    request = cache_pb2.DescribeRequest()
    return int((await channel.stub.Describe(request, timeout=seconds, wait_for_ready=True)).epoch)


async def until_another(channel: ManagerChannel, epoch: int) -> None:
    """Until a manager answers under another epoch."""
    while True:
        with suppress(grpc.aio.AioRpcError):
            if await ask_epoch(channel, 5.0) != epoch:
                return
