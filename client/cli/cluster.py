"""A whole cluster on this machine: one manager and its workers as child processes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpool.v1 import cache_pb2

from ..client import Client
from ..config import ClientConfig
from ..errors import KvpoolError, Unavailable
from .services import MANAGER_MODULE, WORKER_MODULE, service_command
from .supervisor import ChildSpec, Supervisor

HOST: Final = "127.0.0.1"
MANAGER_NAME: Final = "manager"
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start."""

    num_workers: int = 1
    """Workers; they are called worker-0, worker-1, …"""
    port: int = 50051
    """Port of the manager."""
    manager_arguments: tuple[str, ...] = ()
    """Further arguments of the manager."""
    worker_arguments: tuple[str, ...] = field(default=("--model", "smollm2"))
    """Arguments of every worker."""
    share_cores: bool = True
    """Give each worker its part of the CPU's cores, unless OMP_NUM_THREADS is set: two that both take all are slower."""

    @property
    def address(self) -> str:
        """host:port of the manager."""
        return f"{HOST}:{self.port}"

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        """The processes, the manager first."""
        manager = service_command(MANAGER_MODULE, ["--host", HOST, "--port", str(self.port), *self.manager_arguments])
        variables = {"PYTHONUNBUFFERED": "1"}
        threads = dict(variables)
        if self.share_cores and "OMP_NUM_THREADS" not in environment:
            threads["OMP_NUM_THREADS"] = str(max(1, num_cores() // self.num_workers))
        children = [ChildSpec(MANAGER_NAME, manager, variables)]
        for index in range(self.num_workers):
            worker = service_command(
                WORKER_MODULE,
                ["--manager", self.address, "--host", HOST, "--worker-id", f"worker-{index}", *self.worker_arguments],
            )
            children.append(ChildSpec(f"worker-{index}", worker, threads))
        return children


class ClusterFailed(KvpoolError):
    """A service ended while it was needed."""


class Cluster:
    """Starts the children of a spec under a supervisor and says when all of them serve."""

    def __init__(self, spec: ClusterSpec, supervisor: Supervisor) -> None:
        self._spec = spec
        self._supervisor = supervisor

    async def start(self, on_progress: Callable[[str], None]) -> list[cache_pb2.WorkerDescription]:
        """Start everything and wait until the manager knows all workers; returns them.

        on_progress gets a line on what is being waited for. ClusterFailed as soon as a child ends; the caller's
        supervisor then stops the others.
        """
        require_free_port(self._spec.port)
        for child in self._spec.children():
            await self._supervisor.start(child)
        ready = asyncio.create_task(self._wait_until_ready(on_progress))
        died = asyncio.create_task(self.wait_for_failure())
        try:
            await asyncio.wait({ready, died}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return ready.result()
            raise died.result()
        finally:
            ready.cancel()
            died.cancel()
            await asyncio.gather(ready, died, return_exceptions=True)

    async def wait_for_failure(self) -> ClusterFailed:
        """Wait until a child ends by itself, which none should."""
        ended = await self._supervisor.wait_for_exit()
        return ClusterFailed(f"{ended}; its log above says why", reason="CHILD_ENDED")

    async def _wait_until_ready(self, on_progress: Callable[[str], None]) -> list[cache_pb2.WorkerDescription]:
        wanted = {f"worker-{index}" for index in range(self._spec.num_workers)}
        async with Client(config=ClientConfig(manager=self._spec.address)) as client:
            while True:
                try:
                    workers = (await client.describe()).workers
                except Unavailable:
                    on_progress("waiting for the manager")
                else:
                    live = {worker.worker_id for worker in workers}
                    if wanted <= live:
                        return sorted(workers, key=lambda worker: worker.worker_id)
                    missing = ", ".join(sorted(wanted - live))
                    on_progress(f"{len(wanted & live)} of {len(wanted)} workers ready, waiting for {missing}")
                await asyncio.sleep(_POLL_SECONDS)


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """A port of the loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free_port(port: int) -> None:
    """Unavailable if somebody listens on `port`: their manager would be taken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {HOST}:{port}: {error.strerror}; is another cluster running there? "
                "choose another port with --port",
                reason="PORT_IN_USE",
            ) from error
