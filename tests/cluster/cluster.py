"""A real cluster: one manager and any number of workers, each a process of its own, over real gRPC."""

from __future__ import annotations

import asyncio
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cli.launch.cluster import free_port as any_free_port
from kvpool.client import Client, ClientConfig, Completion, GenerateOptions
from kvpool.v1 import cache_pb2, cache_pb2_grpc, worker_pb2_grpc
from kvpool.worker_service.model.source.cache_dir import default_cache_dir
from tests.cluster.fork_server import HURRIED_MANAGER_MODULE, MANAGER_MODULE, SLOW_WORKER_MODULE, WORKER_MODULE
from tests.cluster.models import make_endless_model
from tests.cluster.process import Process, computing
from tests.until import eventually

HOST = "127.0.0.1"
MANAGER = "manager"
GATEWAY = "gateway"
START_SECONDS = 240.0
"""For a process to import everything and load its model, on a machine that is busy with other things."""


_given_out: set[int] = set()
"""Ports of services that may not have been started yet."""


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment, and that was not given out before."""
    while (port := any_free_port()) in _given_out:
        pass
    _given_out.add(port)
    return port


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """num_blocks=9 → --num-blocks 9; prefix_caching=False → --no-prefix-caching."""
    flags: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{option}" if value else f"--no-{option}")
        else:
            flags += [f"--{option}", str(value)]
    return flags


_OF_TESTS: Final = {"step_seconds": SLOW_WORKER_MODULE, "turn_seconds": HURRIED_MANAGER_MODULE}
"""Settings that no service has, and the modules that have them."""
TAKES_TIME: Final = {"runtime": "torch"}
"""Settings of a worker whose steps take milliseconds, so that a fault comes in the middle of a stream."""


class Cluster:
    """Starts, kills, freezes and restarts services; `async with` leaves no process behind.

    The manager and each worker keep their port, name and folder over restarts. Use it in one event loop.
    """

    living: ClassVar[set[Cluster]] = set()
    """Clusters whose logs belong to a test that fails now."""

    def __init__(self, folder: Path, **manager_settings: Any) -> None:
        """`folder`: for logs and states. `turn_seconds` among the settings: how long a stream of Watch keeps its place."""
        self._folder = folder
        self.manager_settings = {"lease_seconds": 6.0, "keep_alive_seconds": 1.0, **manager_settings}
        """Those from its next start on."""
        self._ports: dict[str, int] = {MANAGER: free_port()}
        self._worker_settings: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, Process] = {}
        """The latest process of each name."""
        self._all: list[Process] = []
        self._channels: dict[str, grpc.aio.Channel] = {}

    def __repr__(self) -> str:
        return f"Cluster({list(self.processes.values())})"

    async def __aenter__(self) -> Self:
        self.living.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._all:
            process.kill()
        for channel in self._channels.values():
            await channel.close()
        self.living.discard(self)

    # -- processes

    def address(self, name: str = MANAGER) -> str:
        return f"{HOST}:{self._ports[name]}"

    async def start(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Start the manager, and each worker with its settings, and wait until all are registered."""
        await self.start_manager()
        for name, settings in workers.items():
            self.start_worker(name, **settings)
        await self.until_registered(*workers)

    async def start_manager(self) -> Process:
        """Start the manager, or start it again after its end, and wait until it serves."""
        manager = self.launch_manager()
        await self.until_serving(MANAGER)
        return manager

    def launch_manager(self, name: str = MANAGER) -> Process:
        """Start the manager, and do not wait for it."""
        settings = {"host": HOST, "port": self._ports[name], "state_dir": self.manager_state}
        return self._start(name, MANAGER_MODULE, {**settings, **self.manager_settings})

    def start_worker(self, name: str, *, threads: int = 1, **settings: Any) -> Process:
        """Start a worker with these settings; without any, start it again with those of the last time. `step_seconds` among them:
        what each step takes longer, as on a slow device."""
        if settings:
            self._worker_settings[name] = {
                "manager": self.address(),
                "worker_id": name,
                "host": HOST,
                "device": "cpu",
                "dtype": "float32",
                "cache_dir": default_cache_dir(),
                "state_dir": self.state_dir(name),
                **settings,
            }
            self._ports[name] = free_port()
        arguments = {**self._worker_settings[name], "port": self._ports[name]}
        return self._start(name, WORKER_MODULE, arguments, threads)

    def start_rival(self, name: str, **changes: Any) -> Process:
        """Start another worker of the same name and settings, but for `changes`, next to the one that runs, which keeps its name
        here. A process on another machine would have another `state_dir`."""
        settings = {**self._worker_settings[name], "port": free_port(), **changes}
        return self._start(f"{name}-rival-{len(self._all)}", WORKER_MODULE, settings)

    async def start_gateway(self, name: str = GATEWAY, **settings: Any) -> None:
        """Start a gateway, or start it again on its port, and wait until it answers. The manager need not run."""
        self._ports.setdefault(name, free_port())
        # Not by `_start`: a gateway has its /metrics on its own port, and is not forked.
        arguments = ["--host", HOST, "--port", str(self._ports[name]), "--manager", self.address(), *_flags(settings)]
        log = self._folder / f"{name}.log"
        self.processes[name] = process = Process(name, ["-m", "kvpool.gateway", *arguments], log, computing(1))
        self._all.append(process)

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"http://{self.address(name)}/version", timeout=5):
                    return True
            except (urllib.error.URLError, OSError):
                return False

        async def serves() -> bool:
            self._assert_running(name)
            return await asyncio.to_thread(answers)

        await eventually(serves, f"{name} answers", START_SECONDS)

    @property
    def manager_state(self) -> Path:
        return self._folder / "state"

    def state_dir(self, name: str) -> Path:
        return self._folder / f"state-{name}"

    def _start(self, name: str, module: str, settings: Mapping[str, Any], threads: int = 1) -> Process:
        assert name not in self.processes or self.processes[name].status is not None, f"{name} still runs"
        arguments = [module, *_flags({key: value for key, value in settings.items() if key not in _OF_TESTS})]
        for setting, instead in _OF_TESTS.items():
            if setting in settings:
                arguments[:1] = [instead, str(settings[setting])]
        log = self._folder / f"{name}.log"
        process = Process(name, ["-m", *arguments], log, computing(threads))
        self.processes[name] = process
        self._all.append(process)
        return process

    async def until_serving(self, name: str, service: str = "", *, or_not: bool = False) -> float:
        """Until the process, or a service of it, serves (`or_not`: until it answers); returns when, in monotonic seconds."""
        stub: Any = health_pb2_grpc.HealthStub(self.channel(name))

        async def serving() -> bool:
            self._assert_running(name)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2.0)
            except grpc.aio.AioRpcError:
                return False
            return or_not or answer.status == health_pb2.HealthCheckResponse.SERVING

        await eventually(serving, f"{name} serves", START_SECONDS)
        return time.monotonic()

    async def until_registered(self, *names: str) -> None:
        """Until these workers serve, and the manager knows them under the addresses of now."""
        for name in names:
            # Asked for itself: what the manager knows may be a dead process of the same name whose lease still runs.
            await self.until_serving(name)

        async def registered() -> bool:
            for name in names:
                self._assert_running(name)
            described = {worker.worker_id: worker.address for worker in await self.describe()}
            return all(described.get(name) == self.address(name) for name in names)

        await eventually(registered, f"{names} register", START_SECONDS)

    def _assert_running(self, name: str) -> None:
        process = self.processes[name]
        assert process.status is None, f"{process} has ended:\n{process.log[-2000:]}"

    # -- talking to it

    def channel(self, name: str = MANAGER) -> grpc.aio.Channel:
        """A channel to a service that finds it again soon after a restart."""
        address = self.address(name)
        if address not in self._channels:
            options = [
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 1000),
                ("grpc.max_reconnect_backoff_ms", 100),
                ("grpc.enable_retries", 0),
            ]
            self._channels[address] = grpc.aio.insecure_channel(address, options=options)
        return self._channels[address]

    @property
    def manager_stub(self) -> cache_pb2_grpc.CacheServiceStub:
        return cache_pb2_grpc.CacheServiceStub(self.channel())

    def worker_stub(self, name: str) -> worker_pb2_grpc.WorkerServiceStub:
        return worker_pb2_grpc.WorkerServiceStub(self.channel(name))

    def client(self, **config: Any) -> Client:
        """A client with an own configuration; the caller closes it."""
        return Client(config=ClientConfig(**{"manager": self.address(), **config}))

    async def complete(self, prompt: Sequence[int] | str, **options: Unpack[GenerateOptions]) -> Completion:
        """One whole answer, by a client of its own; goes on behind any end of text."""
        (completion,) = await self.all_at_once([prompt], **options)
        return completion

    async def all_at_once(
        self, prompts: Sequence[Sequence[int] | str], **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """The answers to prompts that arrive at the same instant."""
        asked: GenerateOptions = {"ignore_eos": True, **options}
        async with self.client() as client:
            await client.model(options.get("model"))
            return await asyncio.gather(*(client.generate(prompt, **asked).collect() for prompt in prompts))

    async def describe(self) -> list[cache_pb2.WorkerDescription]:
        """All live workers; none while the manager does not answer."""
        try:
            return list((await self.manager_stub.Describe(cache_pb2.DescribeRequest(), timeout=5.0)).workers)
        except grpc.aio.AioRpcError:
            return []

    async def worker(self, name: str) -> cache_pb2.WorkerDescription:
        """One worker, with its block map."""
        request = cache_pb2.DescribeRequest(worker_id=name, include_blocks=True)
        (worker,) = (await self.manager_stub.Describe(request)).workers
        return worker

    async def until_clean(self) -> None:
        """Until every worker has given everything back; then every law must hold."""

        async def idle() -> bool:
            workers = await self.describe()
            counts = [counts for worker in workers for counts in worker.counts]
            return bool(workers) and all(
                count.held == count.reserved == 0 and count.free + count.cached == count.capacity for count in counts
            )

        await eventually(idle, "all blocks come back")
        assert await self.audit() == []

    async def audit(self) -> list[str]:
        """Violations that the manager finds in its accounts, now."""
        violations = (await self.manager_stub.Check(cache_pb2.CheckRequest())).violations
        return [str(violation).strip() for violation in violations]

    # -- doing it harm

    def kill(self, name: str) -> None:
        """End a service as a crash would."""
        self.processes[name].kill()

    def suspend(self, name: str) -> None:
        """Freeze a service; its connections stay open."""
        self.processes[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a frozen service go on."""
        self.processes[name].send(signal.SIGCONT)


WORKERS = ("a", "b")


class TwoWorkers(Cluster):
    """Both workers serve one model, whose texts never end."""

    def __init__(self, folder: Path, *, lease_seconds: float, tokenizer: bool = False) -> None:
        super().__init__(folder, lease_seconds=lease_seconds, keep_alive_seconds=0.2)
        self.model = make_endless_model(folder / "endless", tokenizer=tokenizer)

    async def start_both(self, **settings: Any) -> None:
        """Start the manager and both workers, with blocks of 4 tokens and these settings."""
        settings = {"model": self.model.path, "block_size": 4, **settings}
        await self.start(dict.fromkeys(WORKERS, settings))

    async def both_live(self) -> None:
        """Both are registered, all blocks have come back, and every law holds."""
        await self.until_registered(*WORKERS)
        await self.until_clean()

    async def _repair(self) -> None:
        """Let a test that has failed in the middle not take others with it."""
        if self.processes[MANAGER].status is not None:
            await self.start_manager()
        for name in WORKERS:
            self.resume(name)
            if self.processes[name].status is not None:
                self.start_worker(name)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Both live before a test and behind it, whatever it has done."""
        await self.both_live()
        try:
            yield
        finally:
            await self._repair()
            await self.both_live()
