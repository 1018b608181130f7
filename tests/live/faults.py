"""Faults in a cluster under load, and what must hold after each."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import uuid4

import grpc

from kvpool.client import Client, KvpoolError
from kvpool.v1 import worker_pb2
from tests.cluster.cluster import MANAGER, Cluster
from tests.load.load import Load
from tests.load.workload import Request
from tests.until import eventually

RECOVERED_SECONDS = 120.0
PROBE_SECONDS = 0.02


class Fault(StrEnum):
    """What happens to a worker."""

    KILLED = "kill -9"
    FROZEN_BRIEFLY = "frozen, thawed within its lease"
    FROZEN_LONG = "frozen, thawed behind its lease"
    TERMINATED = "SIGTERM"
    DRAINED = "drained"


@dataclass(frozen=True)
class Recovery:
    """How long after its kill a manager was there again, in seconds."""

    serves: float
    """It was started at once, and answers that it serves: mostly the start of its process."""
    first_grant: float
    """The first new Allocate has been answered, by any worker."""
    last_grant: float
    """Every worker has had a new Allocate answered."""
    client: float
    """A new request by way of a client that has been there before had its blocks."""
    cpu: float
    """CPU time that the new manager had used when every worker had had an Allocate answered. Unlike the other figures it
    does not depend on what else the machine does."""


@dataclass
class Faults:
    """Does harm, and notes what should not be."""

    cluster: Cluster
    client: Client
    workers: list[str]
    lease_seconds: float
    draw: random.Random
    pause_seconds: float = 1.5
    """Until the next deed at most, when all is well again."""
    num_hit: int = 0
    """Streams in the middle of which a fault fell, each as often as one did."""
    violations: list[str] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    done: Counter[Fault] = field(default_factory=Counter)

    # -- the manager

    async def kill_manager(self, load: Load, request: Request) -> str:
        """kill -9 at a random moment, and start it again at once; `request` is what a new stream asks meanwhile."""
        await self._random_moment(load)
        self.num_hit += load.num_in_the_middle()
        killed_at = time.monotonic()
        self.cluster.kill(MANAGER)
        starting = asyncio.create_task(self._start_manager())
        await asyncio.sleep(0)
        asking = asyncio.create_task(self._ask(request))
        async with asyncio.timeout(RECOVERED_SECONDS):
            grants = await asyncio.gather(*(first_grant(self.cluster, name) for name in self.workers))
            cpu = self.cluster.processes[MANAGER].cpu_seconds
            served_at, asked_at = await starting, await asking
        self.recoveries.append(
            Recovery(
                serves=served_at - killed_at,
                first_grant=min(grants) - killed_at,
                last_grant=max(grants) - killed_at,
                client=asked_at - killed_at,
                cpu=cpu,
            )
        )
        await self.cluster.until_registered(*self.workers)
        return await self.audit("manager killed")

    async def _start_manager(self) -> float:
        await self.cluster.start_manager()
        return time.monotonic()

    async def _ask(self, request: Request) -> float:
        """Until the request's first chunk, which says what the cache served; then it is cancelled."""
        async with self.client.generate(request.prompt, **request.options("asked meanwhile")) as stream:
            try:
                await anext(stream)
            except KvpoolError as error:
                self.violations.append(f"asked while the manager was away: {type(error).__name__}: {error}")
            return time.monotonic()

    # -- workers

    async def harm_worker(self, load: Load, fault: Fault) -> str:
        """One fault at a random moment; returns when the worker is back."""
        name = self.draw.choice(self.workers)
        await self._random_moment(load, name)
        process = self.cluster.processes[name]
        told = len(process.log)
        self.num_hit += load.num_in_the_middle(name)
        if fault is Fault.KILLED:
            self.cluster.kill(name)
            self.cluster.start_worker(name)
        elif fault in (Fault.FROZEN_BRIEFLY, Fault.FROZEN_LONG):
            self.cluster.suspend(name)
            if fault is Fault.FROZEN_BRIEFLY:
                await asyncio.sleep(self.draw.uniform(0.05, 0.5) * self.lease_seconds)
            else:
                await self._until_gone(name)
                await asyncio.sleep(self.draw.uniform(0.0, 0.5) * self.lease_seconds)
            self.cluster.resume(name)
            if fault is Fault.FROZEN_LONG:
                await self._until_back_in_a_new_session(name, told)
        else:
            if fault is Fault.TERMINATED:
                process.send(signal.SIGTERM)
            else:
                await self.client.drain(name, grace=self.draw.uniform(0.0, 0.5) * self.lease_seconds)
            status = await process.ended(RECOVERED_SECONDS)
            if status != 0:
                self.violations.append(f"{name} was told to leave and exited with status {status}")
            self.cluster.start_worker(name)
        await self.cluster.until_registered(*self.workers)
        self.done[fault] += 1
        return await self.audit(f"{name} {fault}")

    async def _until_gone(self, name: str) -> None:
        async def is_gone() -> bool:
            living = [worker.worker_id for worker in await self.cluster.describe()]
            return bool(living) and name not in living

        await eventually(is_gone, f"the lease of {name} ends", RECOVERED_SECONDS)

    async def _until_back_in_a_new_session(self, name: str, told: int) -> None:
        """The thawed worker is told that its session is over, and registers again, with a report of what it holds."""

        async def is_back() -> bool:
            # In any order: the link registers, and the engine says between two steps that the session before has ended.
            lines = self.cluster.processes[name].log[told:]
            return "no longer knows this session" in lines and " registered " in lines

        await eventually(is_back, f"{name} hears that its session is over, and registers again", RECOVERED_SECONDS)

    # -- afterwards

    async def audit(self, fault: str) -> str:
        """Every law of the manager holds after the fault, under load. Returns the fault."""
        self.violations += [f"check, after {fault}: {violation}" for violation in await self.cluster.audit()]
        return fault

    async def _random_moment(self, load: Load, worker: str | None = None) -> None:
        """At which a stream is in the middle, of that worker or of any: a fault that meets nobody proves nothing."""
        await asyncio.sleep(self.draw.uniform(0.0, self.pause_seconds))

        async def meets_someone() -> bool:
            return load.num_in_the_middle(worker) > 0

        await eventually(meets_someone, f"a stream of {worker or 'any worker'} is in the middle", RECOVERED_SECONDS)


async def first_grant(cluster: Cluster, name: str) -> float:
    """Ask the worker itself, so that no client's patience is measured, until a new request has a block table: when, in
    monotonic seconds. A worker says so with the usage, before it computes anything."""
    while True:
        identity = str(uuid4())
        request = worker_pb2.GenerateRequest(sequence_id=identity, attempt=1, tenant_salt=identity)
        request.token_ids.ids.extend(range(1, 10))
        request.stop.max_tokens = 1
        granted_at: float | None = None
        try:
            async for message in cluster.worker_stub(name).Generate(request):
                if message.HasField("usage") and granted_at is None:
                    granted_at = time.monotonic()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        if granted_at is not None:
            return granted_at
        await asyncio.sleep(PROBE_SECONDS)
