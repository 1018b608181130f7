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
            grpc.aio.insecure_channel(str(first_line["address"])) as to_first,
            grpc.aio.insecure_channel(str(second_line["address"])) as to_second,
        ):
            assert await health(to_first, SERVICE) == SERVING
            assert (await health(to_second, ""), await health(to_second, SERVICE)) == (SERVING, NOT_SERVING)
            stub = cache_pb2_grpc.CacheServiceStub(to_second)
            worker = Worker(stub, registration())
            found = await refused(worker.register(), grpc.StatusCode.UNAVAILABLE, "STANDBY")
            assert "name the addresses of all managers" in found.message

            async def follow() -> None:
                async for _ in stub.Watch(pb.WatchRequest()):
                    pass

            await refused(follow(), grpc.StatusCode.UNAVAILABLE, "STANDBY")
            first.send_signal(number)
            assert second.next_line("leads")["epoch"] == 2
            while await health(to_second, SERVICE) != SERVING:
                pass
            assert (await worker.register()).epoch == 2
        second.send_signal(signal.SIGTERM)
        assert second.wait() == 0


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
            found = await refused(call, grpc.StatusCode.UNAVAILABLE, "STANDBY")
            assert "leads no longer" in found.message
        assert server.manager.sessions == before


async def test_metrics_say_who_leads(tmp_path: Path, managers: Managers) -> None:
    with (
        managers.listening(*arguments(tmp_path), event="standing by") as (first, _),
        managers.listening(*arguments(tmp_path), event="standing by") as (second, _),
    ):
        url = str(second.next_line("metrics")["url"])
        assert (await scrape(url)).value("kvpool_manager_leads") == 0
        first.send_signal(signal.SIGKILL)
        second.next_line("leads")
        page = await scrape(url)
        assert page.value("kvpool_manager_leads") == 1
        assert page.value("kvpool_manager_epoch") == 2


def test_a_standby_ends_at_sigterm(tmp_path: Path, managers: Managers) -> None:
    with managers.listening(*arguments(tmp_path), event="standing by") as (first, _):
        first.next_line("leads")
        with managers.listening(*arguments(tmp_path), event="standing by") as (second, _):
            second.send_signal(signal.SIGTERM)
            assert second.wait() == 0


def test_a_state_that_is_damaged_ends_a_standby_and_says_why(tmp_path: Path, managers: Managers) -> None:
    (tmp_path / "epoch").write_text("nonsense")
    code, said = managers.fails(*arguments(tmp_path))
    assert code == 1
    assert "is damaged" in said


@pytest.mark.parametrize("election", ["etcd:1.2.3.4:2379", "kubernetes:", "kubernetes:name", "files"])
def test_an_election_that_there_is_not_is_refused(tmp_path: Path, managers: Managers, election: str) -> None:
    code, said = managers.fails("--port", "0", "--state-dir", str(tmp_path), "--election", election)
    assert code == 2
    assert "election" in said


def test_kubernetes_outside_a_pod_is_refused(tmp_path: Path, managers: Managers) -> None:
    code, said = managers.fails("--port", "0", "--state-dir", str(tmp_path), "--election", "kubernetes:default/kvpool")
    assert code == 1
    assert "--kubernetes-api" in said
