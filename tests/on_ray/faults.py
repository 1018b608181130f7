"""Clusters on Ray nodes whose processes, of each kind, and whole nodes are killed under load: no stream is lost or disturbed.

`make test SUITE=ray` runs this file. `make test` does not collect it: it needs Ray, a hundred megabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from kvpool.client import Client, ClientConfig, KvpoolError
from tests.client.processes import parent
from tests.cluster.cluster import free_port
from tests.live.workload import TINY, Model, make_call, make_requests
from tests.load.load import Load
from tests.load.workload import Reference, Request
from tests.model.plain_loop import PlainLoop
from tests.on_ray.nodes import HOST, Nodes, Service, flags
from tests.until import until

pytestmark = pytest.mark.timeout(600)

NUM_REQUESTS: Final = 8
NUM_STREAMS: Final = 6
NUM_NEW: Final = 300
"""Tokens of a stream, which lasts six seconds at least."""
VICTIM_SECONDS: Final = 30.0
"""Until a stream runs on the worker that is to die."""


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Ray with no node but its head: to start and stop it takes as long as a test."""
    started = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture
def nodes(head: Nodes) -> Iterator[Nodes]:
    """Nothing runs, and there is no node, before a test and after it."""
    yield head
    head.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.make(TINY, tmp_path_factory.mktemp("model"))


class Managers:
    """A file that lists the managers, as a client of a cluster reads it whose managers move."""

    def __init__(self, folder: Path, nodes: Nodes) -> None:
        self._file = folder / "managers"
        self._nodes = nodes

    async def write(self) -> dict[str, Service]:
        """Write it as it is now; returns all processes."""
        services = await asyncio.to_thread(self._nodes.services)
        addresses = [service.address for name, service in services.items() if name.startswith("manager-")]
        self._file.write_text("".join(f"{address}\n" for address in addresses if address))
        return services

    def client(self) -> Client:
        return Client(config=ClientConfig(manager=f"file:{self._file}"))


@contextlib.asynccontextmanager
async def under_load(client: Client, workload: Sequence[Reference]) -> AsyncIterator[Load]:
    """Streams run meanwhile; afterwards none is lost, and each text is that of its request alone."""
    load = Load(client, workload, NUM_STREAMS, random.Random(2), make_call)
    async with load:
        await until(lambda: load.num_in_the_middle() == NUM_STREAMS, pause=0.01, seconds=VICTIM_SECONDS)
        yield load
    assert load.violations == []
    assert set(load.totals.outcomes) == {"whole, length"}


async def until_in_the_middle(load: Load, worker: str) -> None:
    """Wait until a stream runs on this worker."""
    await until(lambda: load.num_in_the_middle(worker) > 0, pause=0.01, seconds=VICTIM_SECONDS)


async def undisturbed(client: Client, model: Model) -> list[Reference]:
    """Half greedy, half drawn; each is what the model alone says."""
    loop = PlainLoop(model.path)

    async def ask(request: Request) -> Reference:
        answer = await client.generate(request.prompt, **request.options(f"undisturbed {request.number}")).collect()
        assert len(answer.token_ids) == request.max_tokens
        differences = loop.differences(request.prompt, request.sampling, answer.token_ids)
        assert [index for index, is_tie in differences if not is_tie] == []
        return Reference(request, answer.token_ids, answer.text)

    return await asyncio.gather(*map(ask, make_requests(model, NUM_REQUESTS, random.Random(1), NUM_NEW)))


async def sessions(client: Client) -> dict[str, int]:
    """Of the registered workers, by name."""
    try:
        return {worker.worker_id: worker.session for worker in (await client.describe(timeout=2)).workers}
    except KvpoolError:
        return {}


async def until_registered(client: Client, *names: str, anew: Mapping[str, int] | None = None) -> None:
    """Wait until these workers are registered, and those of `anew` in another session than there."""
    before = (anew or {}).items()
    async with asyncio.timeout(60):
        while set(found := await sessions(client)) != set(names) or before & found.items():
            await asyncio.sleep(0.1)


async def until_clean(client: Client) -> None:
    """All blocks come back, and the manager's accounts are right."""
    async with asyncio.timeout(30):
        while any(count.held for worker in (await client.describe()).workers for count in worker.counts):
            await asyncio.sleep(0.1)
    assert (await client.check()).violations == []


def kill_actor(service: Service) -> None:
    """The process of Ray in which the actor is; the kernel tells its child to stop."""
    assert service.pid is not None
    os.kill(parent(service.pid), signal.SIGKILL)


async def until_another(nodes: Nodes, service: Service) -> Service:
    """Wait until Ray has started the process again."""
    while True:
        now = (await asyncio.to_thread(nodes.until_all_run))[service.name]
        if now.pid != service.pid:
            return now


async def who_leads(services: dict[str, Service]) -> str:
    """The manager that answers for itself."""
    while True:
        for name, service in services.items():
            if name.startswith("manager-") and service.address:
                config = ClientConfig(manager=service.address, first_contact=0.5)
                async with Client(config=config) as client:
                    with contextlib.suppress(KvpoolError):
                        await client.describe(timeout=1)
                        return name


async def test_each_kind_of_process_and_a_node_are_killed_under_load(
    nodes: Nodes, model: Model, tmp_path: Path
) -> None:
    """Managers with a shared disk: one stands by on another node, and leads when the node of the first is lost."""
    for _ in range(2):
        nodes.add(num_cpus=4)
    http = free_port()
    settings = {"workers": 3, "port": 0, "state_dir": tmp_path / "shared", "http": http}
    said = nodes.kvpool("up", "--detach", *flags(model, **settings), KVPOOL_WORKER_LOG_LEVEL="warning")
    assert "ready: " in said
    assert "Ray reports usage" in said
    managers = Managers(tmp_path, nodes)
    services = await managers.write()
    assert set(services) == {"manager-0", "manager-1", "worker-0", "worker-1", "worker-2", "gateway"}
    assert services["manager-0"].node != services["manager-1"].node
    assert len({services[f"worker-{index}"].node for index in range(3)}) == 2
    names = ("worker-0", "worker-1", "worker-2")
    async with managers.client() as client:
        workload = await undisturbed(client, model)
        async with under_load(client, workload) as load:
            for victim, fault in (
                ("gateway", Service.kill),
                ("worker-0", Service.kill),
                (await who_leads(services), Service.kill),
                ("worker-1", kill_actor),
            ):
                killed = {}
                if victim.startswith("worker"):
                    await until_in_the_middle(load, victim)
                    killed[victim] = (await sessions(client))[victim]
                fault(services[victim])
                again = await until_another(nodes, services[victim])
                assert again.node == services[victim].node  # its place is kept for it
                services = await managers.write()
                await until_registered(client, *names, anew=killed)
            with socket.create_connection((HOST, http), timeout=10):
                pass
            lost = services[await who_leads(services)].node
            assert lost is not None
            gone = [name for name, service in services.items() if service.node == lost]
            await asyncio.to_thread(nodes.lose, lost)
            await managers.write()
            # A manager of the two has no node now; all else moves to the other one.
            (unplaced,) = [name for name in gone if name.startswith("manager-")]
            services = await asyncio.to_thread(nodes.until_all_run, unplaced)
            assert services[unplaced].state == "no node has room for it"
            await until_registered(client, *names)
            new = await asyncio.to_thread(nodes.add, 1)
            services = await asyncio.to_thread(nodes.until_all_run)
            assert services[unplaced].node == new
        assert load.totals.num_moved > 0
        await until_clean(client)


async def test_a_manager_without_a_shared_disk_is_started_again_elsewhere(
    nodes: Nodes, model: Model, tmp_path: Path
) -> None:
    """Its epoch is lost with its node; it has another address there, which the workers find."""
    both = [nodes.add(num_cpus=4) for _ in range(2)]
    nodes.kvpool("up", "--detach", *flags(model, workers=2, port=0))
    managers = Managers(tmp_path, nodes)
    services = await managers.write()
    async with managers.client() as client:
        workload = await undisturbed(client, model)
        async with under_load(client, workload) as load:
            for fault in (Service.kill, kill_actor):
                before = services["manager-0"]
                fault(before)
                again = await until_another(nodes, before)
                assert again.address != before.address
                services = await managers.write()
                await until_registered(client, "worker-0", "worker-1")
            assert load.totals.num_moved == 0  # a worker lives on without the manager
            assert again.node is not None
            await asyncio.to_thread(nodes.lose, again.node)
            services = await asyncio.to_thread(nodes.until_all_run)
            await managers.write()
            assert {service.node for service in services.values()} == {*both} - {again.node}
            await until_registered(client, "worker-0", "worker-1")
        await until_clean(client)


async def test_it_grows_shrinks_and_leaves_in_order(nodes: Nodes, model: Model, tmp_path: Path) -> None:
    nodes.add(num_cpus=5)
    nodes.kvpool("up", "--detach", *flags(model, workers=1))
    managers = Managers(tmp_path, nodes)
    await managers.write()
    async with managers.client() as client:
        workload = await undisturbed(client, model)
        async with under_load(client, workload) as load:
            await asyncio.to_thread(nodes.kvpool, "up", "--detach", *flags(model, workers=3))
            assert set(await sessions(client)) == {"worker-0", "worker-1", "worker-2"}
            await until_in_the_middle(load, "worker-2")
            await asyncio.to_thread(nodes.kvpool, "up", "--detach", *flags(model, workers=2))
            assert set(await sessions(client)) == {"worker-0", "worker-1"}
            await client.drain("worker-1")
            await until_registered(client, "worker-0")
            while "worker-1" in await asyncio.to_thread(nodes.services):  # it is not started again
                await asyncio.sleep(0.1)
        await until_clean(client)
    said = nodes.kvpool("up", "--detach", "--workers", "4", "--model", "another", status=1)
    assert f"of the workers: --model {model.path}" in said
    assert "kvpool ray down" in said
    assert set(nodes.services()) == {"manager-0", "worker-0"}
    assert "2 processes have left" in nodes.kvpool("down")
    assert nodes.services() == {}
    assert "no process is left" in nodes.kvpool("down")
    # What was reserved for the old ones is free for a larger one.
    with nodes.in_the_foreground(*flags(model, workers=1, cpus_per_worker=4)) as process:
        read_until(process, "ready: ")
        process.send_signal(signal.SIGINT)
        assert "2 processes have left" in process.communicate(timeout=60)[0]
        assert process.returncode == 130
    assert nodes.services() == {}


async def test_one_command_at_a_time_and_what_a_killed_one_leaves_is_cleared(nodes: Nodes, model: Model) -> None:
    nodes.add(num_cpus=2)
    # A manager has room, and then no worker of this size.
    too_large = flags(model, cpus_per_worker=2)
    with nodes.in_the_foreground(*too_large) as process:
        read_until(process, "waiting for room for worker-0, 2 CPU")
        assert "another `kvpool ray up`" in nodes.kvpool("up", *too_large, status=1)
        process.send_signal(signal.SIGINT)
        assert "what this command had started was removed" in process.communicate(timeout=60)[0]
        assert process.returncode == 130
    assert nodes.services() == {}
    with nodes.in_the_foreground(*too_large) as process:
        read_until(process, "waiting for room")
        process.kill()
    assert set(nodes.services()) == {"manager-0"}
    assert "1 processes have left" in nodes.kvpool("down")
    nodes.kvpool("up", "--detach", *flags(model))
    assert set(nodes.services()) == {"manager-0", "worker-0"}


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    """Read what it writes, up to a line that begins so."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(beginning):
        assert line, "it has ended"


async def test_what_cannot_run_says_why_and_leaves_nothing(nodes: Nodes, model: Model, tmp_path: Path) -> None:
    nodes.add(num_cpus=2)
    said = nodes.kvpool("up", "--model", str(tmp_path / "nothing"), status=1)
    assert str(tmp_path / "nothing") in said
    said = nodes.kvpool("up", "--block-size", "3", status=2)
    assert "--block-size must be a power of two" in said
    said = nodes.kvpool("up", "--blok-size", "4", status=2)
    assert "--block-size" in said
    said = nodes.kvpool("up", *flags(model, state_dir=tmp_path / "shared"), status=1)
    assert "2 managers need as many nodes" in said
    assert "has 1 with room for one" in said
    said = nodes.kvpool("up", *flags(model, http=free_port()), status=1, KVPOOL_GATEWAY_MAX_N="1000000")
    assert "gateway: refuses its settings" in said
    assert nodes.services() == {}
