"""A second manager's process: it stands by, takes over, and says which of the two it does; its epoch grows."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool.cache_service.election.epoch import MAX_EPOCH, StateError
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


def begin(directory: Path) -> int:
    with closing(FileEpochs.open(directory)) as store:
        return store.epoch


def test_every_life_has_a_larger_epoch(tmp_path: Path) -> None:
    assert [begin(tmp_path / "a" / "b") for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\0" * 26,
        b"kvpool epoch 1",
        b"kvpool epoch 12 83dcefb7\n",
        b"kvpool epoch 1 83dcefb7",
        b"1\n",
        b"kvpool epoch 01 83dcefb7\n",
        bytes(range(192, 256)),
    ],
)
def test_a_torn_or_foreign_file_is_an_error_and_never_a_smaller_epoch(tmp_path: Path, damage: bytes) -> None:
    assert begin(tmp_path) == 1
    (tmp_path / "epoch").write_bytes(damage)
    for _ in range(2):
        with pytest.raises(StateError, match="is damaged"):
            FileEpochs.open(tmp_path)
    assert (tmp_path / "epoch").read_bytes() == damage


async def test_raise_above_is_durable_and_never_lowers(tmp_path: Path) -> None:
    with closing(FileEpochs.open(tmp_path)) as store:
        assert [await store.raise_above(epoch) for epoch in (0, 9, 9, 3, 10)] == [1, 10, 10, 10, 11]
    assert begin(tmp_path) == 12


async def test_used_up_epochs_are_an_error_and_never_wrap(tmp_path: Path) -> None:
    with closing(FileEpochs.open(tmp_path)) as store:
        assert await store.raise_above(MAX_EPOCH - 1) == MAX_EPOCH
        with pytest.raises(StateError, match="used up"):
            await store.raise_above(MAX_EPOCH)
    with pytest.raises(StateError, match="used up"):
        FileEpochs.open(tmp_path)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match=r"file/state cannot be used: Not a directory"):
        FileEpochs.open(tmp_path / "file" / "state")
    (tmp_path / "state" / "epoch.tmp").mkdir(parents=True)
    with pytest.raises(StateError, match=r"state cannot be used: Is a directory"):
        FileEpochs.open(tmp_path / "state")


async def test_an_epoch_is_not_raised_in_a_directory_that_was_given_back(tmp_path: Path) -> None:
    """The next manager may have begun a larger one there."""
    store = FileEpochs.open(tmp_path)
    for _ in range(2):
        store.close()
    assert begin(tmp_path) == 2
    with pytest.raises(StateError, match="was given back"):
        await store.raise_above(1)
    assert begin(tmp_path) == 3
