"""A cluster on this machine: a manager and its workers as child processes, or workers for a manager elsewhere."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool.process.address import DEFAULT_PORT, EVERY_ADDRESS, join_host_port
from kvpool.v1 import cache_pb2

from ...client import Client
from ...config import ClientConfig
from ...errors import KvpoolError, Unavailable
from .children import ChildSpec, Supervisor
from .gpus import VISIBLE_VARIABLE, one_gpu_each
from .restarts import GaveUp, Keeper
from .services import MANAGER_MODULE, WORKER_MODULE, WORKER_SETTINGS_MODULE, service_command

HOST: Final = "127.0.0.1"
MANAGER_NAME: Final = "manager"
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to start."""

    num_workers: int = 1
    name: str = "worker"
    """Of the workers: they are called worker-0, worker-1, …"""
    host: str = HOST
    """Address that all of them listen on."""
    port: int = DEFAULT_PORT
    """Port of the manager."""
    join: str | None = None
    """host:port of a manager that runs elsewhere; none is started then."""
    worker_arguments: tuple[str, ...] = field(default=("--model", "smollm2"))
    """Arguments of every worker."""
    state_dir: Path | None = None
    """Folder of the manager's state, with those of the workers in it; None: their own."""
    metrics_host: str = HOST
    metrics_port: int | None = None
    """Of the first process, the others take the next ones; None: no /metrics."""
    gpu_each: bool = False
    """Each worker sees one GPU, which no other one sees."""
    share_cores: bool = True
    """Give each worker its part of the CPU's cores, unless OMP_NUM_THREADS is set: two that both take all are slower."""

    @property
    def address(self) -> str:
        """host:port under which this machine reaches the manager."""
        return self.join or join_host_port(HOST if self.host in EVERY_ADDRESS else self.host, self.port)

    @property
    def worker_names(self) -> list[str]:
        """Their worker_ids, in order."""
        return [f"{self.name}-{index}" for index in range(self.num_workers)]

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Where each process tells its metrics, the manager's first; empty if none does."""
        return {
            name: f"http://{join_host_port(self.metrics_host, port)}/metrics" for name, port in self._metrics_ports()
        }

    def _metrics_ports(self) -> list[tuple[str, int]]:
        if self.metrics_port is None:
            return []
        names = [*([MANAGER_NAME] if self.join is None else []), *self.worker_names]
        return [(name, self.metrics_port + index) for index, name in enumerate(names)]

    def require_free_ports(self) -> None:
        """Unavailable if somebody listens on one that is ours: in the logs of children it would be harder to find."""
        if self.join is None:
            require_free_port(self.host, self.port)
        for _, port in self._metrics_ports():
            require_free_port(self.metrics_host, port, "--metrics-port", "--metrics-host")

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        """The processes, the manager first if one is to be started. Raises InvalidRequest if there are too few GPUs."""
        unbuffered = {"PYTHONUNBUFFERED": "1"}
        children = []
        if self.join is None:
            listen = ["--host", self.host, "--port", str(self.port)]
            command = service_command(
                MANAGER_MODULE,
                [*listen, *self._metrics_arguments(MANAGER_NAME), *self._state_arguments(MANAGER_NAME)],
            )
            children.append(ChildSpec(MANAGER_NAME, command, unbuffered))
        gpus = one_gpu_each(self.num_workers, environment) if self.gpu_each else None
        for index, name in enumerate(self.worker_names):
            command = service_command(WORKER_MODULE, self._arguments_of_worker(name))
            variables = dict(unbuffered)
            if self.share_cores and "OMP_NUM_THREADS" not in environment:
                variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // self.num_workers))
            if gpus is not None:
                variables[VISIBLE_VARIABLE] = gpus[index]
            children.append(ChildSpec(name, command, variables))
        return children

    def worker_settings_command(self) -> list[str]:
        """A command that ends at once: with status 0 if workers can use their arguments, else with that of a worker, which says
        why on stderr. Asked for --help among them it prints that."""
        return service_command(WORKER_SETTINGS_MODULE, self._arguments_of_worker(self.worker_names[0]))

    def _arguments_of_worker(self, name: str) -> list[str]:
        return [
            *("--manager", self.address, "--host", self.host, "--worker-id", name),
            *self._metrics_arguments(name),
            *self._state_arguments(name),
            *self.worker_arguments,
        ]

    def _state_arguments(self, name: str) -> list[str]:
        if self.state_dir is None:
            return []
        return ["--state-dir", str(self.state_dir if name == MANAGER_NAME else self.state_dir / "workers" / name)]

    def _metrics_arguments(self, name: str) -> list[str]:
        port = dict(self._metrics_ports()).get(name)
        return [] if port is None else ["--metrics-host", self.metrics_host, "--metrics-port", str(port)]


class ClusterFailed(KvpoolError):
    """A service ended while it was needed."""


class Cluster:
    """Starts the children of a spec under a supervisor, says when all of them serve, and keeps them at it."""

    def __init__(self, spec: ClusterSpec, supervisor: Supervisor) -> None:
        self._spec = spec
        self._supervisor = supervisor
        self._children: dict[str, ChildSpec] = {}

    async def start(
        self, on_progress: Callable[[str], None], on_event: Callable[[str], None] | None = None
    ) -> list[cache_pb2.WorkerDescription]:
        """Start everything and wait until the manager knows all workers; returns them.

        on_progress gets a line on what is being waited for. A worker that ends meanwhile is left out, and on_event gets a line for
        it. ClusterFailed if the manager ends, or the last worker, or without on_event any child; the caller's supervisor then stops
        the others.
        """
        self._spec.require_free_ports()
        self._children = {child.name: child for child in self._spec.children()}
        for child in self._children.values():
            await self._supervisor.start(child)
        ready = asyncio.create_task(self._wait_until_ready(on_progress))
        exits = {asyncio.create_task(self._supervisor.wait_for_exit())}
        try:
            while True:
                await asyncio.wait({ready, *exits}, return_when=asyncio.FIRST_COMPLETED)
                exit_ = exits.pop()
                if not exit_.done():
                    exits.add(exit_)
                    return ready.result()
                ended = exit_.result()
                del self._children[ended.name]
                if on_event is None or ended.name == MANAGER_NAME or not self._workers_left():
                    raise ClusterFailed(f"{ended}; its log above says why", reason="CHILD_ENDED")
                on_event(f"{ended}; its log above says why. The cluster goes on without it")
                exits.add(asyncio.create_task(self._supervisor.wait_for_exit()))
        finally:
            for task in (ready, *exits):
                task.cancel()
            await asyncio.gather(ready, *exits, return_exceptions=True)

    def _workers_left(self) -> set[str]:
        """Names of the workers that have not ended."""
        return set(self._children) - {MANAGER_NAME}

    async def wait_for_failure(self) -> ClusterFailed:
        """Wait until a child ends by itself, which none should."""
        ended = await self._supervisor.wait_for_exit()
        return ClusterFailed(f"{ended}; its log above says why", reason="CHILD_ENDED")

    async def keep_alive(self, on_event: Callable[[str], None]) -> None:
        """After `start`: start again what dies, until the last worker has taken its leave (SIGTERM, `kvpool drain`).

        on_event gets a line for everything of that kind. Raises ClusterFailed if the manager dies again and again, or every worker
        that is left.
        """
        try:
            await Keeper(self._supervisor, self._children, MANAGER_NAME, on_event).keep()
        except GaveUp as error:
            raise ClusterFailed(str(error), reason="CHILD_ENDED") from None

    async def _wait_until_ready(self, on_progress: Callable[[str], None]) -> list[cache_pb2.WorkerDescription]:
        async with Client(config=ClientConfig(manager=self._spec.address)) as client:
            while True:
                try:
                    workers = (await client.describe()).workers
                except Unavailable:
                    on_progress("waiting for the manager")
                else:
                    wanted = self._workers_left()
                    live = {worker.worker_id for worker in workers}
                    if wanted <= live:
                        ours = (worker for worker in workers if worker.worker_id in wanted)
                        return sorted(ours, key=lambda worker: self._spec.worker_names.index(worker.worker_id))
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


def require_free_port(host: str, port: int, port_flag: str = "--port", host_flag: str = "--host") -> None:
    """Unavailable if somebody listens there: their manager would be taken for ours. The flags are those to be changed."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            hint = (
                f"is another cluster running there? choose another port with {port_flag}"
                if in_use
                else f"{host} must be an address of this machine (`ip address` lists them); give one with {host_flag}"
            )
            raise Unavailable(
                f"cannot listen on {join_host_port(host, port)}: {error.strerror}; {hint}",
                reason="PORT_IN_USE" if in_use else "NO_SUCH_ADDRESS",
            ) from error
