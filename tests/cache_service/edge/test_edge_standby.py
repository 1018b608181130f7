"""A second manager's process: it stands by, takes over, and says which of the two it does."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.request_sizes import SERVICE
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.managers import Managers
from tests.cache_service.edge.peer import Worker, refused, registration
from tests.scrape import scrape

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def arguments(state_dir: Path) -> tuple[str, ...]:
    return "--port", "0", "--metrics-port", "0", "--state-dir", str(state_dir), "--election", "file"


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_refuses_every_call_until_the_leader_has_ended_and_leads_then(
    tmp_path: Path, managers: Managers, number: signal.Signals
) -> None:
    with (
        managers.listening(*arguments(tmp_path), event="standing by") as (first, first_line),
        managers.listening(*arguments(tmp_path), event="standing by") as (second, second_line),
    ):
        assert first.next_line("leads")["epoch"] == 1
        async with (
            grpc.aio.insecure_channel(first_line["address"]) as to_first,
            grpc.aio.insecure_channel(second_line["address"]) as to_second,
        ):
            assert await health(to_first, SERVICE) == SERVING
            assert (await health(to_second, ""), await health(to_second, SERVICE)) == (SERVING, NOT_SERVING)
            stub = cache_pb2_grpc.CacheServiceStub(to_second)
            worker = Worker(stub, registration())
            found = await refused(worker.register(), "STANDBY")
            assert "name the addresses of all managers" in found.message
            await refused(stub.Watch(pb.WatchRequest()).read(), "STANDBY")
            url = second.next_line("metrics")["url"]
            assert (await scrape(url)).value("kvpool_manager_leads") == 0
            first.send(number)
            assert second.next_line("leads")["epoch"] == 2
            while await health(to_second, SERVICE) != SERVING:
                pass
            assert (await worker.register()).epoch == 2
            page = await scrape(url)
            assert (page.value("kvpool_manager_leads"), page.value("kvpool_manager_epoch")) == (1, 2)
        with managers.listening(*arguments(tmp_path), event="standing by") as (third, _):
            for process in (third, second):
                process.send(signal.SIGTERM)
                assert process.wait() == 0


async def test_a_manager_whose_lead_is_over_answers_no_call(tmp_path: Path) -> None:
    """It was frozen, and looks at calls that have waited for it before it looks at anything else."""

    class Epochs(FileEpochs):
        is_over = False

        def leads(self) -> bool:
            return super().leads() and not self.is_over

    epochs = Epochs(tmp_path)
    await epochs.lead()
    async with (
        ManagerServer(ManagerSettings(port=0, state_dir=tmp_path), epochs) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        worker = Worker(stub, registration())
        await worker.register()
        epochs.is_over = True
        before = server.manager.sessions
        for call in (worker.register(), stub.Describe(pb.DescribeRequest())):
            found = await refused(call, "STANDBY")
            assert "leads no longer" in found.message
        assert server.manager.sessions == before


def test_a_state_that_is_damaged_ends_a_standby_and_says_why(tmp_path: Path, managers: Managers) -> None:
    (tmp_path / "epoch").write_text("nonsense")
    code, said = managers.fails(*arguments(tmp_path))
    assert code == 1
    assert "is damaged" in said
