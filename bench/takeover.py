"""How long nobody leads: from the end of the manager that leads to the first call that the next one answers.

python -m bench.takeover [--runs N] [--json]

Two managers with `--election file` on one machine, and a client that asks Describe again and again over the list of both. The one
that leads is ended by SIGKILL, then by SIGTERM; the other one takes over, and the first one is started again. For comparison the
same of one manager alone, which is killed and started again by its supervisor without a pause. Nobody is registered. Milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import grpc
from rich.table import Table

from bench.report import command_line, facts, print_table, progress
from kvpool.process.manager_channel import ManagerChannel
from kvpool.v1 import cache_pb2

SETTLED_SECONDS: Final = 1.0
"""Before each end: the other one stands by."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Managers:
    """Processes by port."""

    def __init__(self, state_dir: Path, num_managers: int) -> None:
        self._state_dir = state_dir
        self._election = ["--election", "file"] if num_managers > 1 else []
        self._ports = [_free_port() for _ in range(num_managers)]
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        for port in self._ports:
            self.start(port)

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def start(self, port: int) -> None:
        command = [
            sys.executable,
            "-m",
            "kvpool.cache_service",
            "--port",
            str(port),
            "--state-dir",
            str(self._state_dir),
        ]
        self._running[port] = subprocess.Popen([*command, *self._election, "--log-level", "error"])

    def end(self, port: int, number: int) -> None:
        """Send a signal that ends one."""
        self._running[port].send_signal(number)

    async def restart(self, port: int) -> None:
        """Start one again as soon as it has ended."""
        await asyncio.to_thread(self._running[port].wait)
        self.start(port)

    def leader(self) -> int:
        """By the lock file, which has the process id."""
        pid = int((self._state_dir / "lock").read_text())
        return next(port for port, process in self._running.items() if process.pid == pid)

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@asynccontextmanager
async def _managers(num_managers: int) -> AsyncIterator[_Managers]:
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        managers = _Managers(Path(folder), num_managers)
        try:
            yield managers
        finally:
            managers.close()


async def _ask(channel: ManagerChannel, seconds: float) -> int:
    """The epoch of the manager that answers."""
    request = cache_pb2.DescribeRequest()
    return int((await channel.stub.Describe(request, timeout=seconds, wait_for_ready=True)).epoch)


async def _until_another(channel: ManagerChannel, epoch: int) -> None:
    while True:
        with suppress(grpc.aio.AioRpcError):
            if await _ask(channel, 5.0) != epoch:
                return


async def measure(num_managers: int, number: int, num_runs: int) -> list[float]:
    """Milliseconds from the signal to the first answer under the next epoch."""
    found = []
    async with _managers(num_managers) as managers, aclosing(ManagerChannel(managers.addresses)) as channel:
        for _ in range(num_runs):
            await asyncio.sleep(SETTLED_SECONDS)
            epoch = await _ask(channel, 30.0)
            port = managers.leader()
            began = time.perf_counter()
            managers.end(port, number)
            restarting = None if num_managers > 1 else asyncio.create_task(managers.restart(port))
            await _until_another(channel, epoch)
            found.append((time.perf_counter() - began) * 1e3)
            await (managers.restart(port) if restarting is None else restarting)
    return found


async def run(num_runs: int) -> dict[str, list[float]]:
    cases = {
        "two, SIGKILL": (2, signal.SIGKILL),
        "two, SIGTERM": (2, signal.SIGTERM),
        "one, SIGKILL and a restart": (1, signal.SIGKILL),
    }
    found = {}
    for name, (num_managers, number) in cases.items():
        progress(name)
        found[name] = await measure(num_managers, number, num_runs)
    return found


def main() -> None:
    arguments = command_line(__doc__, runs=10, of="ends of each kind").parse_args()
    found = asyncio.run(run(arguments.runs))
    if arguments.json:
        print(json.dumps({"milliseconds": found, "facts": facts("grpcio")}))
        return
    table = Table("managers", box=None, pad_edge=False)
    for column in ("least, ms", "median, ms", "most, ms", "ends"):
        table.add_column(column, justify="right")
    for name, milliseconds in found.items():
        table.add_row(
            name,
            f"{min(milliseconds):.0f}",
            f"{statistics.median(milliseconds):.0f}",
            f"{max(milliseconds):.0f}",
            str(len(milliseconds)),
        )
    print_table(table)


if __name__ == "__main__":
    main()
