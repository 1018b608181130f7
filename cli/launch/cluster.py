"""Runs a cluster on this machine: a manager and its workers as child processes, or workers for a manager on another machine."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from kvpool.client.client import Client
from kvpool.client.config import ClientConfig
from kvpool.client.errors import KvpoolError, Unavailable
from kvpool.process.address import DEFAULT_PORT, join_host_port, reachable_host
from kvpool.process.services import GATEWAY_MODULE, MANAGER_MODULE, WORKER_MODULE, service_command
from kvpool.v1 import cache_pb2

from .children import ChildExit, Children, ChildSpec
from .gpus import VISIBLE_VARIABLE, one_gpu_each
from .restarts import GaveUp, Restarts
from .trial import try_settings

HOST: Final = "127.0.0.1"
MANAGER_NAME: Final = "manager"
GATEWAY_NAME: Final = "gateway"
_POLL_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """The processes to start."""

    num_workers: int = 1
    name: str = "worker"
    """The workers are called NAME-0, NAME-1, …"""
    host: str = HOST
    """Address that all processes listen on."""
    port: int = DEFAULT_PORT
    """Port of the manager."""
    join: str | None = None
    """host:port of a running manager; None: a manager is started."""
    worker_arguments: tuple[str, ...] = field(default=("--model", "smollm2"))
    """Arguments of every worker."""
    state_dir: Path | None = None
    """State folder of the manager, which contains those of the workers; None: the default of each process."""
    log_format: str | None = None
    """Format of all log lines; None: each process's own setting."""
    metrics_host: str = HOST
    metrics_port: int | None = None
    """Port of /metrics of the first process; the others take the next ports. None: no /metrics."""
    http_port: int | None = None
    """Port of a gateway on HOST; None: there is none."""
    gpu_each: bool = False
    """Whether each worker sees one GPU of its own."""
    share_cores: bool = True
    """Whether each worker gets an equal part of the CPU's cores, unless OMP_NUM_THREADS is set. Two workers that both use all cores
    are slower."""

    @property
    def address(self) -> str:
        """host:port under which this machine reaches the manager."""
        return self.join or join_host_port(reachable_host(self.host), self.port)

    @property
    def worker_names(self) -> list[str]:
        """worker_ids of the workers, in order."""
        return [f"{self.name}-{index}" for index in range(self.num_workers)]

    @property
    def metrics_urls(self) -> dict[str, str]:
        """URLs of /metrics by process, the manager's first; empty without a metrics port."""
        return {
            name: f"http://{join_host_port(self.metrics_host, port)}/metrics" for name, port in self._metrics_ports()
        }

    @property
    def http_url(self) -> str:
        """URL of the gateway; empty without one."""
        return "" if self.http_port is None else f"http://{join_host_port(HOST, self.http_port)}"

    def _metrics_ports(self) -> list[tuple[str, int]]:
        if self.metrics_port is None:
            return []
        names = [*([MANAGER_NAME] if self.join is None else []), *self.worker_names]
        return [(name, self.metrics_port + index) for index, name in enumerate(names)]

    def require_free_ports(self) -> None:
        """Raise Unavailable if one of the ports is taken, which would be harder to find in the logs of the processes."""
        if self.join is None:
            require_free_port(self.host, self.port)
        if self.http_port is not None:
            require_free_port(HOST, self.http_port, "--http")
        for _, port in self._metrics_ports():
            require_free_port(self.metrics_host, port, "--metrics-port", "--metrics-host")

    def children(self, environment: Mapping[str, str] = os.environ) -> list[ChildSpec]:
        """Return the processes, the manager first unless there is one to join. Raises InvalidRequest if there are too few GPUs."""
        gpus = one_gpu_each(self.num_workers, environment) if self.gpu_each else None
        children = []
        if self.join is None:
            listen = ["--host", self.host, "--port", str(self.port)]
            children.append(self._child(MANAGER_NAME, MANAGER_MODULE, listen))
        for index, name in enumerate(self.worker_names):
            variables = {}
            if self.share_cores and "OMP_NUM_THREADS" not in environment:
                variables["OMP_NUM_THREADS"] = str(max(1, num_cores() // self.num_workers))
            if gpus is not None:
                variables[VISIBLE_VARIABLE] = gpus[index]
            place = ["--manager", self.address, "--host", self.host, "--worker-id", name]
            children.append(self._child(name, WORKER_MODULE, place, self.worker_arguments, variables))
        if self.http_port is not None:
            listen = ["--host", HOST, "--port", str(self.http_port), "--manager", self.address]
            children.append(self._child(GATEWAY_NAME, GATEWAY_MODULE, listen))
        return children

    def _child(
        self,
        name: str,
        module: str,
        arguments: list[str],
        last: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> ChildSpec:
        """Return a process with these arguments, those for metrics, state and log between the two parts."""
        if (port := dict(self._metrics_ports()).get(name)) is not None:
            arguments += ["--metrics-host", self.metrics_host, "--metrics-port", str(port)]
        if self.state_dir is not None and name != GATEWAY_NAME:
            folder = self.state_dir if name == MANAGER_NAME else self.state_dir / "workers" / name
            arguments += ["--state-dir", str(folder)]
        if self.log_format is not None:
            arguments += ["--log-format", self.log_format]
        command = service_command(module, [*arguments, *last])
        return ChildSpec(name, command, {"PYTHONUNBUFFERED": "1", **(variables or {})})


class ClusterFailed(KvpoolError):
    """A process ended while it was needed."""


class Cluster:
    """Starts the processes of a spec, reports when all of them serve, and restarts them."""

    def __init__(self, spec: ClusterSpec, children: Children) -> None:
        self._spec = spec
        self._children = children
        self._specs: dict[str, ChildSpec] = {}
        """Specs of the processes that have been started and should run, by name."""

    async def start(
        self, on_progress: Callable[[str], None], on_event: Callable[[str], None] | None = None
    ) -> list[cache_pb2.WorkerDescription]:
        """Start the manager, then the workers, and wait until the manager lists all workers; returns them.

        While the manager starts, a dry run checks the workers' settings: WorkerRefused. on_progress gets a line about the pending
        step. A worker that ends meanwhile is left out, and on_event gets a line about it. ClusterFailed if the manager ends, or the
        last worker, or, without on_event, any process. After an error the caller must stop the processes that run.
        """
        self._spec.require_free_ports()
        specs = {spec.name: spec for spec in self._spec.children()}
        workers = [specs[name] for name in self._spec.worker_names]
        if MANAGER_NAME in specs:
            await self._start([specs[MANAGER_NAME]])
            await self._watch(_both(self._wait_until_ready(on_progress), _try_settings(workers)), on_event)
        else:
            await _try_settings(workers)
        await self._start([*workers, *(specs[name] for name in specs if name == GATEWAY_NAME)])
        return await self._watch(self._wait_until_ready(on_progress), on_event)

    async def _start(self, specs: Sequence[ChildSpec]) -> None:
        for spec in specs:
            await self._children.start(spec)
            self._specs[spec.name] = spec

    async def _watch(self, work: Coroutine[Any, Any, T], on_event: Callable[[str], None] | None) -> T:
        """Return the result of `work`. Raises ClusterFailed if a process that is needed ends before."""
        working = asyncio.create_task(work)
        exiting = None
        try:
            while not working.done():
                exiting = asyncio.create_task(self._children.wait_for_exit())
                await asyncio.wait({working, exiting}, return_when=asyncio.FIRST_COMPLETED)
                if exiting.done():
                    self._on_exit(exiting.result(), on_event)
            return working.result()
        finally:
            tasks = [task for task in (working, exiting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_exit(self, ended: ChildExit, on_event: Callable[[str], None] | None) -> None:
        """Report that a process has ended. Raises ClusterFailed if it is needed."""
        del self._specs[ended.name]
        if on_event is None or ended.name in (MANAGER_NAME, GATEWAY_NAME) or not self._workers_left():
            raise ClusterFailed(f"{ended}; its log above says why", reason="CHILD_ENDED")
        on_event(f"{ended}; its log above says why. The cluster continues without it")

    def _workers_left(self) -> set[str]:
        """Return the names of the workers that have not ended."""
        return set(self._specs) - {MANAGER_NAME, GATEWAY_NAME}

    async def keep_alive(self, on_event: Callable[[str], None]) -> None:
        """Restart processes that die until the last worker has left (SIGTERM, `kvpool drain`). Call it after `start`.

        on_event gets a line for each of these events. Raises ClusterFailed if the manager, or every remaining worker, dies
        repeatedly.
        """
        try:
            await Restarts(self._children, self._specs, MANAGER_NAME, on_event, kept=[GATEWAY_NAME]).keep()
        except GaveUp as error:
            raise ClusterFailed(str(error), reason="CHILD_ENDED") from None

    async def _wait_until_ready(self, on_progress: Callable[[str], None]) -> list[cache_pb2.WorkerDescription]:
        """Wait until the manager answers and lists all workers that have been started; returns them in order."""
        # A call that waits for the manager asks it at growing intervals, up to a second: the workers would start that much later.
        config = ClientConfig(manager=self._spec.address, first_contact=_POLL_SECONDS)
        async with Client(config=config) as client:
            while True:
                try:
                    workers = (await client.describe()).workers
                except Unavailable:
                    on_progress("waiting for the manager")
                else:
                    expected = self._workers_left()
                    live = {worker.worker_id for worker in workers}
                    if expected <= live and not await self._gateway_listens():
                        on_progress("waiting for the gateway")
                    elif expected <= live:
                        ours = (worker for worker in workers if worker.worker_id in expected)
                        return sorted(ours, key=lambda worker: self._spec.worker_names.index(worker.worker_id))
                    else:
                        missing = ", ".join(sorted(expected - live))
                        on_progress(f"{len(expected & live)} of {len(expected)} workers ready, waiting for {missing}")
                await asyncio.sleep(_POLL_SECONDS)

    async def _gateway_listens(self) -> bool:
        """Whether the gateway accepts connections. True if there is none, or none yet."""
        if GATEWAY_NAME not in self._specs or self._spec.http_port is None:
            return True
        return await listens(HOST, self._spec.http_port)


async def _try_settings(workers: Sequence[ChildSpec]) -> None:
    """Let one worker check the settings. Raises WorkerRefused."""
    if workers:  # their settings differ in nothing that can be refused
        await try_settings(workers[0])


async def _both(first: Coroutine[Any, Any, object], second: Coroutine[Any, Any, object]) -> None:
    """Run both at the same time. If one fails, the other one is cancelled and the error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(first)
            group.create_task(second)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def listens(host: str, port: int) -> bool:
    """Whether a process accepts connections there."""
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def free_port(host: str = HOST) -> int:
    """Return a port of this address of the machine that is free at this moment."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host.strip("[]"), 0))
        port: int = probe.getsockname()[1]
        return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def require_free_port(host: str, port: int, port_flag: str = "--port", host_flag: str = "--host") -> None:
    """Raise Unavailable if the port is taken; the message names the flags to change. A manager that listens there would be taken
    for our own."""
    with socket.socket(_family(host)) as probe:
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
