"""A cluster whose processes have metrics pages, a gateway in front of it, and a Prometheus that scrapes all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from kvpool.client import GenerateOptions, KvpoolError
from tests.cluster.cluster import GATEWAY, HOST, MANAGER, Cluster, free_port
from tests.cluster.process import Process
from tests.observe.prometheus import Prometheus, run_prometheus
from tests.until import eventually

FIRES_WITHIN_SECONDS: Final = 180.0


class ObservedCluster(Cluster):
    """A Cluster with metrics. `modules`: what runs under a name, instead of the real service. Other settings are the manager's."""

    def __init__(self, folder: Path, modules: Mapping[str, str] | None = None, **manager_settings: Any) -> None:
        super().__init__(folder, **manager_settings)
        self._modules = dict(modules or {})
        self._metrics_ports: dict[str, int] = {MANAGER: free_port()}

    def _start(self, name: str, module: str, settings: Mapping[str, Any], threads: int = 1) -> Process:
        port = self._metrics_ports.setdefault(name, free_port())
        return super()._start(name, self._modules.get(name, module), {**settings, "metrics_port": port}, threads)

    async def post(self, path: str, body: Mapping[str, Any]) -> int:
        """The status of the gateway's answer, read to its end; 0 without one."""
        return await asyncio.to_thread(self._ask, path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes) -> int:
        request = urllib.request.Request(
            f"http://{self.address(GATEWAY)}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    @property
    def targets(self) -> dict[str, list[str]]:
        """What Prometheus scrapes, by job."""
        workers = [f"{HOST}:{port}" for name, port in self._metrics_ports.items() if name != MANAGER]
        return {
            "kvpool-manager": [f"{HOST}:{self._metrics_ports[MANAGER]}"],
            "kvpool-worker": workers,
            "kvpool-gateway": [self.address(GATEWAY)] if GATEWAY in self.processes else [],
        }


@asynccontextmanager
async def meanwhile(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These run inside the context, and end only by being cancelled after it."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended


class Observed:
    def __init__(self, cluster: ObservedCluster, prometheus: Prometheus) -> None:
        self.cluster = cluster
        self.prometheus = prometheus

    async def until_firing(self, *names: str) -> None:
        """Until each of these alerts fires, or has fired since this call. What they say must name real things."""
        seen: dict[str, dict[str, str]] = {}

        async def all_have() -> bool:
            seen.update(await self.prometheus.firing())
            return seen.keys() >= set(names)

        try:
            await eventually(all_have, f"{names} fire", FIRES_WITHIN_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}; these have fired: {sorted(seen)}") from None
        for name in names:
            for text in seen[name].values():
                assert "<no value>" not in text, (name, text)
                assert "error expanding" not in text, (name, text)

    async def until_scraped(self, job: str) -> None:
        """Until every target of the job has been scraped after this call: a process that ends before leaves no trace."""
        now = time.time()

        async def scraped() -> bool:
            # Of a sample: of an expression it would be the time of the evaluation.
            times = await self.prometheus.query(f'timestamp(process_start_time_seconds{{job="{job}"}})')
            return len(times) == len(self.cluster.targets[job]) and min(times) > now

        await eventually(scraped, f"{job} is scraped", FIRES_WITHIN_SECONDS)

    async def until_calm(self) -> None:
        """Until every target is up and no alert fires: what fires later has its cause later."""
        num_targets = sum(map(len, self.cluster.targets.values()))

        async def calm() -> bool:
            ups = await self.prometheus.query("up")
            return len(ups) == num_targets and all(ups) and not await self.prometheus.firing()

        await eventually(calm, "every target is up and no alert fires", FIRES_WITHIN_SECONDS)

    @asynccontextmanager
    async def load(
        self, num_streams: int, make_prompt: Callable[[int], Sequence[int]], *, max_tokens: int
    ) -> AsyncIterator[None]:
        """So many streams at any time; each begins anew when it has ended or failed."""
        options: GenerateOptions = {"max_tokens": max_tokens, "ignore_eos": True, "timeout": 60}
        async with self.cluster.client() as client:

            async def repeat(number: int) -> None:
                while True:
                    with contextlib.suppress(KvpoolError):
                        await client.generate(make_prompt(number), **options).collect()
                    number += num_streams
                    await asyncio.sleep(0.05)

            async with meanwhile(*map(repeat, range(num_streams))):
                yield


@asynccontextmanager
async def observe(
    folder: Path,
    workers: Mapping[str, Mapping[str, Any]],
    *,
    modules: Mapping[str, str] | None = None,
    gateway: bool = False,
    **manager_settings: Any,
) -> AsyncIterator[Observed]:
    """Start all of it, wait until it is calm, and end it."""
    async with ObservedCluster(folder, modules, **manager_settings) as cluster:
        await cluster.start(workers)
        if gateway:
            await cluster.start_gateway()
        async with run_prometheus(folder / "prometheus", cluster.targets) as prometheus:
            observed = Observed(cluster, prometheus)
            await observed.until_calm()
            yield observed
