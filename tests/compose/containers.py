"""The cluster of docker-compose.yml as a test sees it: `docker` and `docker compose` from outside, gRPC on the published ports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from typing import Any, NamedTuple, Unpack

import grpc

from kvpool.client import Client, ClientConfig, Completion, GenerateOptions
from kvpool.client.health import ask_health
from kvpool.v1 import cache_pb2, worker_pb2, worker_pb2_grpc
from tests.compose.project import NAME, PORTS, compose_command, compose_environment
from tests.until import eventually

HOST = "127.0.0.1"
MANAGER = "manager"
WORKERS = ("worker-0", "worker-1")
SERVICES = (MANAGER, *WORKERS)
NETWORK = f"{NAME}_default"
START_SECONDS = 420.0
"""For a worker to import everything and load its model on a machine that is busy with other things."""


class Ended(NamedTuple):
    """A command that has ended."""

    status: int
    output: str
    """stdout and stderr together."""


class Containers:
    """Use it in one event loop."""

    def __init__(self) -> None:
        self._environment = compose_environment(os.environ)

    # -- docker

    async def try_(self, *command: str) -> Ended:
        """Run a command to its end, whatever that is."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
        )
        output, _ = await process.communicate()
        assert process.returncode is not None
        return Ended(process.returncode, output.decode(errors="replace"))

    async def docker(self, *arguments: str) -> str:
        """Run `docker …` to its good end; returns what it printed."""
        ended = await self.try_("docker", *arguments)
        assert ended.status == 0, f"docker {' '.join(arguments)}: {ended.output}"
        return ended.output

    async def compose(self, *arguments: str) -> str:
        """Run `docker compose …` for the test's project to its good end; returns what it printed."""
        ended = await self.try_(*compose_command(*arguments))
        assert ended.status == 0, f"docker compose {' '.join(arguments)}: {ended.output}"
        return ended.output

    async def inside(self, service: str, *command: str) -> Ended:
        """Run a command in a service's container, as that service's user."""
        return await self.try_("docker", "exec", container(service), *command)

    async def inspect(self, service: str) -> dict[str, Any]:
        """All that the engine knows of a service's container."""
        (found,) = json.loads(await self.docker("container", "inspect", container(service)))
        assert isinstance(found, dict)
        return found

    async def log(self, service: str, lines: int = 1000) -> str:
        """The end of a service's log, from all lives of its container."""
        return await self.docker("logs", "--tail", str(lines), container(service))

    async def epochs(self) -> list[int]:
        """The epochs with which the manager has begun, one for each life of its container."""
        return [int(epoch) for epoch in re.findall(r"listening .*\bepoch=(\d+)", await self.log(MANAGER))]

    # -- waiting

    async def until_serving(self, *services: str) -> None:
        """Until the engine calls them healthy, they answer on their published ports, and the manager knows the workers."""
        for service in services:

            async def healthy(service: str = service) -> bool:
                state = (await self.inspect(service))["State"]
                return (state["Running"], state["Health"]["Status"]) == (True, "healthy")

            await eventually(healthy, f"the container of {service} is healthy", START_SECONDS)

            async def answers(service: str = service) -> bool:
                return (await asyncio.to_thread(ask_health, address(service))).serving

            await eventually(answers, f"{service} serves on {address(service)}", START_SECONDS)

        async def known() -> bool:
            live = {worker.worker_id for worker in (await self.describe()).workers}
            return live >= set(services) - {MANAGER}

        await eventually(known, f"the manager knows {services}", START_SECONDS)

    async def until_gone(self, worker: str) -> None:
        """Until the manager no longer counts a worker among the living."""

        async def gone() -> bool:
            return worker not in {found.worker_id for found in (await self.describe()).workers}

        await eventually(gone, f"the lease of {worker} ends", START_SECONDS)

    async def until_idle(self) -> None:
        """Until every worker has given everything back, and has said that it is busy with nothing: Route goes by that."""

        async def idle() -> bool:
            workers = (await self.describe()).workers
            counts = [counts for worker in workers for counts in worker.counts]
            return (
                bool(counts)
                and all(count.held == count.reserved == 0 for count in counts)
                and all(count.free + count.cached == count.capacity for count in counts)
                and not any(worker.load.num_running + worker.load.num_waiting for worker in workers)
                and not any(worker.load.num_uncomputed_tokens for worker in workers)
            )

        await eventually(idle, "all blocks come back and no worker is busy", START_SECONDS)

    async def until_clean(self) -> None:
        """Until every worker is idle; then every law must hold."""
        await self.until_idle()
        async with self.client() as client:
            assert list((await client.check()).violations) == []

    # -- talking to it

    def client(self) -> Client:
        """The caller closes it."""
        return Client(config=ClientConfig(manager=address(MANAGER)))

    async def describe(self) -> cache_pb2.DescribeResponse:
        async with self.client() as client:
            return await client.describe()

    async def complete(self, prompt: str, **options: Unpack[GenerateOptions]) -> Completion:
        """One whole answer, by a client of its own."""
        async with self.client() as client:
            return await client.generate(prompt, **options).collect()

    async def tokens_from(self, worker: str, prompt: str, max_tokens: int) -> list[int]:
        """What this very worker generates, greedily and beyond any end of text, with nothing from its cache."""
        async with self.client() as client:
            model = await client.model()
        once = secrets.token_hex(8)
        request = worker_pb2.GenerateRequest(
            sequence_id=once,
            attempt=1,
            token_ids=worker_pb2.TokenIds(ids=model.encode_prompt(prompt)),
            model_fingerprint=model.fingerprint,
            tenant_salt=once,  # of its own, so that nobody has computed this prompt under it
            stop=worker_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        async with grpc.aio.insecure_channel(address(worker)) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return [token async for message in stub.Generate(request, timeout=120) for token in message.token_ids]


def address(service: str) -> str:
    """host:port of a service, from outside."""
    return f"{HOST}:{PORTS[service]}"


def container(service: str) -> str:
    """The name that compose gives to a service's only container."""
    return f"{NAME}-{service}-1"
