"""Two managers, of which one leads: it is killed, told to stop and frozen while streams run, and no text is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.request_sizes import SERVICE
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.client import Client
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import Worker, registration
from tests.cache_service.election.api_server import ApiServer, listening
from tests.cluster.cluster import MANAGER, Cluster, free_port
from tests.cluster.models import make_endless_model
from tests.load.judge import Delivered
from tests.model.plain_loop import PlainLoop
from tests.until import until

MANAGERS = ("manager-1", "manager-2")
STEP_SECONDS = 0.03


class TwoManagers(Cluster):
    """Its manager is that of the two which leads."""

    def __init__(self, folder: Path, election: dict[str, Any]) -> None:
        super().__init__(folder, lease_seconds=3.0, keep_alive_seconds=0.2, **election)
        self._ports |= {name: free_port() for name in MANAGERS}
        self.leader = MANAGERS[0]

    def address(self, name: str = MANAGER) -> str:
        """Of both managers, where no one of them is named."""
        of_one = super().address
        return ",".join(map(of_one, MANAGERS)) if name == MANAGER else of_one(name)

    def channel(self, name: str = MANAGER) -> grpc.aio.Channel:
        """To the one that leads, where the manager is meant."""
        return super().channel(self.leader if name == MANAGER else name)

    async def until_led_by(self, name: str) -> None:
        await self.until_serving(name, SERVICE)
        self.leader = name


class Reader:
    """Reads one stream, which no other worker may continue, until it leaves."""

    def __init__(self, client: Client, prompt: Sequence[int]) -> None:
        self._stream = client.generate(prompt, max_tokens=10_000, ignore_eos=True)
        self._delivered = Delivered()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self._stream:
            self._delivered.add(chunk)

    async def reads_on(self) -> None:
        """Until tokens have come that were not there yet."""
        before = len(self._delivered.tokens)
        await until(lambda: self._task.done() or len(self._delivered.tokens) > before)
        assert not self._task.done(), self._task

    async def leave(self) -> list[int]:
        """What has come in all."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert self._delivered.misplaced == []
        return self._delivered.tokens


@contextlib.asynccontextmanager
async def election(kind: str) -> AsyncIterator[dict[str, Any]]:
    if kind == "file":
        yield {"election": "file"}
        return
    async with listening(ApiServer()) as url:
        yield {"election": "kubernetes:default/kvpool", "kubernetes_api": url, "leader_lease_seconds": 2}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "kubernetes"])
async def test_no_text_is_disturbed_when_the_other_manager_takes_over(kind: str, tmp_path: Path) -> None:
    model = make_endless_model(tmp_path / "endless")
    prompts = [[200 + index, *range(20)] for index in range(2)]
    async with election(kind) as settings, TwoManagers(tmp_path, settings) as cluster:
        first, second = MANAGERS
        cluster.launch_manager(first)
        await cluster.until_led_by(first)
        cluster.launch_manager(second)
        settings = {"block_size": 4, "num_blocks": 8193, "reserve_seconds": 60, "step_seconds": STEP_SECONDS}
        cluster.start_worker("a", model=model.path, **settings)
        await cluster.until_registered("a")
        async with cluster.client(continuation=False) as client:
            readers = [Reader(client, prompt) for prompt in prompts]
            for reader in readers:
                await reader.reads_on()
            # A file's lock is the kernel's: one that is frozen keeps it.
            for number in (signal.SIGKILL, signal.SIGTERM, *([signal.SIGSTOP] if kind == "kubernetes" else [])):
                gone = cluster.leader
                (next_one,) = set(MANAGERS) - {gone}
                cluster.processes[gone].send(number)
                await cluster.until_led_by(next_one)
                await cluster.until_registered("a")
                if number == signal.SIGSTOP:
                    cluster.resume(gone)
                    assert await cluster.processes[gone].ended() == 1
                    assert "lease default/kvpool" in cluster.processes[gone].log
                else:
                    await cluster.processes[gone].ended()
                    cluster.launch_manager(gone)
                for reader in readers:
                    await reader.reads_on()
            texts = [await reader.leave() for reader in readers]
        again = [await cluster.complete(prompt, max_tokens=5) for prompt in prompts]
        await cluster.until_clean()
    loop = PlainLoop(model.path)
    for prompt, text, later in zip(prompts, texts, again, strict=True):
        assert all(is_tie for _, is_tie in loop.differences(prompt, {}, text))
        assert list(later.token_ids) == text[:5]
        assert later.num_cached_tokens == 20


async def test_a_manager_that_stops_gives_up_its_lead_and_the_next_one_ends_leases(tmp_path: Path) -> None:
    """Both in this process, whose end would give up the lead too."""
    settings = ManagerSettings(port=0, state_dir=tmp_path, lease_seconds=1, keep_alive_seconds=0.2)
    leading = FileEpochs(tmp_path)
    await leading.lead()
    async with ManagerServer(settings, leading) as first, ManagerServer(settings, FileEpochs(tmp_path)) as second:
        await first.stop()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second.port}") as channel:
            await until(lambda: hasattr(second, "manager"))
            await Worker(cache_pb2_grpc.CacheServiceStub(channel), registration()).register()
            assert second.manager.sessions
            await until(lambda: not second.manager.sessions)
