"""Each alert fires when its fault is made, on a real Prometheus over a real cluster. faults.py lists which.

`make test SUITE=observe` runs this file. `make test` does not collect it: it needs Prometheus.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool.cache_service.election.file import FileEpochs
from kvpool.v1 import cache_pb2
from tests.cache_service.edge.peer import registration
from tests.cluster.cluster import GATEWAY, MANAGER, TAKES_TIME
from tests.cluster.models import make_endless_model
from tests.observe.faults import FIRED_BY
from tests.observe.observed_cluster import meanwhile, observe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKER = "one"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = make_endless_model(tmp_path_factory.mktemp("model"), tokenizer=True)
    return {"model": model.path, "block_size": 4, "num_blocks": 257}


def short(number: int) -> list[int]:
    return [1 + (number * 37 + index) % 200 for index in range(9)]


def repeated(what: Any, pause: float = 0.3) -> AbstractAsyncContextManager[None]:
    """Call and await it again and again meanwhile."""

    async def repeat() -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await what()
            await asyncio.sleep(pause)

    return meanwhile(repeat())


async def test_alerts_name_a_manager_that_is_gone(tmp_path: Path, worker: dict[str, Any]) -> None:
    async with observe(tmp_path, {WORKER: worker}) as observed:
        cluster = observed.cluster
        cluster.kill(MANAGER)
        await observed.until_firing("KvpoolManagerDown")
        # A worker keeps its session while it does not know better; a new process has none.
        cluster.kill(WORKER)
        cluster.start_worker(WORKER)
        await observed.until_firing("KvpoolWorkerWithoutManager")
        await cluster.start_manager()
        await observed.until_calm()


async def test_alerts_name_managers_of_which_none_leads(tmp_path: Path, worker: dict[str, Any]) -> None:
    """Another process holds the lock of the state folder, as a manager that is frozen does."""
    async with observe(tmp_path, {WORKER: worker}, election="file") as observed:
        cluster = observed.cluster
        cluster.kill(MANAGER)
        held = FileEpochs.open(cluster.manager_state)
        try:
            cluster.launch_manager()
            await observed.until_firing(*FIRED_BY["managers_of_which_none_leads"])
        finally:
            held.close()
        await observed.until_calm()


async def test_alerts_name_a_worker_that_is_gone(tmp_path: Path, worker: dict[str, Any]) -> None:
    async with observe(tmp_path, {WORKER: worker}, gateway=True) as observed:
        cluster = observed.cluster
        body = {"model": (await cluster.worker(WORKER)).model_name, "prompt": short(1), "max_tokens": 2}
        assert await cluster.post("/v1/completions", body) == 200
        cluster.kill(WORKER)
        async with repeated(lambda: cluster.post("/v1/completions", body)):
            await observed.until_firing(*FIRED_BY["a_worker_that_is_gone"])


async def test_alerts_name_a_gateway_that_restarts_and_stays_away(tmp_path: Path, worker: dict[str, Any]) -> None:
    async with observe(tmp_path, {WORKER: worker}, gateway=True) as observed:
        for _ in range(3):
            observed.cluster.kill(GATEWAY)
            await observed.cluster.start_gateway()
            await observed.until_scraped("kvpool-gateway")
        await observed.until_firing("KvpoolRestarts")
        observed.cluster.kill(GATEWAY)
        await observed.until_firing("KvpoolGatewayDown")


async def test_alerts_name_a_queue_that_is_full(tmp_path: Path, worker: dict[str, Any]) -> None:
    """Answers of 12 s, one at a time: others wait as long, and five places are few for twelve."""
    slow = {**worker, **TAKES_TIME, "step_seconds": 0.5, "max_num_seqs": 1, "max_num_waiting": 5}
    async with observe(tmp_path, {WORKER: slow}) as observed, observed.load(12, short, max_tokens=24):
        await observed.until_firing(*FIRED_BY["a_queue_that_is_full"])


async def test_alerts_name_a_pool_that_is_too_small(tmp_path: Path, worker: dict[str, Any]) -> None:
    tight = {**worker, **TAKES_TIME, "step_seconds": 0.02, "num_blocks": 25, "max_num_seqs": 5}
    async with observe(tmp_path, {WORKER: tight}) as observed, observed.load(5, short, max_tokens=55):
        await observed.until_firing(*FIRED_BY["a_pool_that_is_too_small"])


async def test_alerts_name_a_budget_that_is_used_up(tmp_path: Path, worker: dict[str, Any]) -> None:
    """A manager of 30 blocks for a worker of 256; the next manager has room for 10 of those that the worker holds."""
    async with observe(tmp_path, {WORKER: worker}, max_total_blocks=30) as observed:
        async with observed.load(4, short, max_tokens=20):
            await observed.until_firing("KvpoolBudgetNearlyUsed")
        observed.cluster.kill(MANAGER)
        observed.cluster.manager_settings["max_total_blocks"] = 10
        await observed.cluster.start_manager()
        await observed.until_firing("KvpoolReportRefused")


async def test_alerts_name_a_report_that_does_not_end(tmp_path: Path, worker: dict[str, Any]) -> None:
    async with observe(tmp_path, {WORKER: worker}) as observed:
        numbers = iter(range(1, 1 << 20))

        async def register() -> None:
            request = registration("silent", register_no=next(numbers), holds_state=True)
            await observed.cluster.manager_stub.Register(request)

        async with repeated(register, pause=2.0):
            await observed.until_firing(*FIRED_BY["a_report_that_does_not_end"])


async def test_alerts_name_a_manager_with_mistakes(tmp_path: Path, worker: dict[str, Any]) -> None:
    modules = {MANAGER: "tests.observe.broken_manager"}
    async with observe(tmp_path, {WORKER: worker}, modules=modules) as observed:
        check = observed.cluster.manager_stub.Check
        assert not (await check(cache_pb2.CheckRequest())).violations
        observed.cluster.processes[MANAGER].send(signal.SIGUSR1)
        async with repeated(lambda: check(cache_pb2.CheckRequest())):
            await observed.until_firing("KvpoolLawBroken")
            observed.cluster.processes[MANAGER].send(signal.SIGUSR2)
            await observed.until_firing("KvpoolManagerErrors")


async def test_alerts_name_a_worker_whose_steps_fail(tmp_path: Path, worker: dict[str, Any]) -> None:
    modules = {WORKER: "tests.observe.failing_worker"}
    async with observe(tmp_path, {WORKER: worker}, modules=modules) as observed, observed.load(2, short, max_tokens=2):
        await observed.until_firing(*FIRED_BY["a_worker_whose_steps_fail"])


def test_faults_and_tests_have_the_same_names() -> None:
    tests = dict(inspect.getmembers(sys.modules[__name__], inspect.iscoroutinefunction))
    assert {name.removeprefix("test_alerts_name_") for name in tests if name.startswith("test_")} == FIRED_BY.keys()
