"""Two managers, of which one leads: it is killed, told to stop and frozen while streams run, and no text is disturbed."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cache_service.server import SERVICE
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.election.api_server import ApiServer, listening
from tests.cluster.cluster import HOST, MANAGER, Cluster, free_port
from tests.cluster.fork_server import MANAGER_MODULE
from tests.cluster.models import make_endless_model
from tests.cluster.polling import eventually

OTHER = "manager-2"
NUM_NEW = 300
STEP_SECONDS = 0.02
LEADER_LEASE_SECONDS = 2


class TwoManagers(Cluster):
    """`manager` is that of the two which leads; names in `processes` stay."""

    def __init__(self, folder: Path, election: dict[str, Any]) -> None:
        super().__init__(folder, lease_seconds=3.0, keep_alive_seconds=0.2)
        self._ports[OTHER] = free_port()
        self._election = election
        self.leader = MANAGER

    def address(self, name: str = MANAGER) -> str:
        """Of both managers, where that of the manager is meant."""
        return (
            ",".join(f"{HOST}:{self._ports[one]}" for one in (MANAGER, OTHER))
            if name == MANAGER
            else super().address(name)
        )

    def address_of(self, name: str) -> str:
        """Of one manager."""
        return f"{HOST}:{self._ports[name]}"

    def start_one(self, name: str) -> None:
        """Start a manager, or start it again."""
        settings = {"host": HOST, "port": self._ports[name], "state_dir": self._folder / "state"}
        self._start(name, MANAGER_MODULE, {**settings, **self._manager_settings, **self._election})

    @property
    def standby(self) -> str:
        """The one that does not lead."""
        return OTHER if self.leader == MANAGER else MANAGER

    def channel(self, name: str = MANAGER) -> grpc.aio.Channel:
        """To the one that leads, where the manager is meant."""
        if name not in (MANAGER, OTHER):
            return super().channel(name)
        address = self.address_of(self.leader)
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        return self._channels[address]

    @property
    def manager_stub(self) -> cache_pb2_grpc.CacheServiceStub:
        return cache_pb2_grpc.CacheServiceStub(self.channel())

    async def leads(self, name: str) -> bool:
        """Whether this manager says so."""
        async with grpc.aio.insecure_channel(self.address_of(name)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5.0)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_led_by(self, name: str) -> None:
        """Until this manager leads."""
        await eventually(lambda: self.leads(name), f"{name} leads")
        self.leader = name


@contextlib.asynccontextmanager
async def election(kind: str) -> AsyncIterator[dict[str, Any]]:
    """Settings of both managers."""
    if kind == "file":
        yield {"election": "file"}
        return
    async with listening(ApiServer()) as url:
        yield {
            "election": "kubernetes:default/kvpool",
            "kubernetes_api": url,
            "leader_lease_seconds": LEADER_LEASE_SECONDS,
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "kubernetes"])
async def test_no_text_is_disturbed_when_the_other_manager_takes_over(kind: str, tmp_path: Path) -> None:
    model = make_endless_model(tmp_path / "endless")
    prompts = [[200 + index, *range(20)] for index in range(4)]
    async with election(kind) as settings, TwoManagers(tmp_path, settings) as cluster:
        cluster.start_one(MANAGER)
        await cluster.until_led_by(MANAGER)
        cluster.start_one(OTHER)
        worker: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 8193,
            "reserve_seconds": 60,
            "step_seconds": STEP_SECONDS,
        }
        cluster.start_worker("a", model=model.path, **worker)
        await cluster.until_registered("a")
        undisturbed = await cluster.all_at_once(prompts, max_tokens=NUM_NEW, tenant_salt="undisturbed")
        async with cluster.client() as client:
            streams = [client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True) for prompt in prompts]
            for stream in streams:
                while not (await anext(stream)).token_ids:
                    pass
            # A file's lock is the kernel's: one that is frozen keeps it.
            for number in (signal.SIGKILL, signal.SIGTERM, *([signal.SIGSTOP] if kind == "kubernetes" else [])):
                gone, next_one = cluster.leader, cluster.standby
                cluster.processes[gone].send(number)
                await cluster.until_led_by(next_one)
                await cluster.until_registered("a")
                if number == signal.SIGSTOP:
                    cluster.resume(gone)
                    assert await cluster.processes[gone].ended() == 1
                    assert "lease default/kvpool" in cluster.processes[gone].log
                else:
                    await cluster.processes[gone].ended()
                    cluster.start_one(gone)
            disturbed = [await stream.collect() for stream in streams]
        again = [await cluster.complete(prompt, max_tokens=5) for prompt in prompts]
        await cluster.until_clean()
    for right, outlived, later in zip(undisturbed, disturbed, again, strict=True):
        assert outlived.token_ids == right.token_ids
        assert outlived.num_attempts == 1
        assert later.token_ids == right.token_ids[:5]
        assert later.num_cached_tokens == 20
