"""A manager that listens on a free port of loopback, and a real channel to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.managers import Manager, Managers
from tests.cache_service.edge.peer import Worker, registration


@pytest.fixture(scope="session")
def managers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Managers]:
    yield Managers(tmp_path_factory.mktemp("managers"))
    Manager.fork_server.stop()


@pytest.fixture
def settings(tmp_path: Path) -> ManagerSettings:
    """Any free ports, also for metrics, a state directory of its own, leases that no test outlives."""
    return ManagerSettings(
        port=0, metrics_port=0, state_dir=tmp_path / "state", lease_seconds=600, keep_alive_seconds=0.1
    )


@contextlib.asynccontextmanager
async def running(settings: ManagerSettings) -> AsyncIterator[ManagerServer]:
    """A manager in this process; its laws hold in the end."""
    with contextlib.closing(FileEpochs.open(settings.state_folder)) as epochs:
        server = ManagerServer(settings, epochs)
        await server.start()
        try:
            yield server
        finally:
            await server.stop(notice_seconds=0)
        assert server.manager.check().violations == []


@pytest.fixture
async def server(settings: ManagerSettings) -> AsyncIterator[ManagerServer]:
    async with running(settings) as server:
        yield server


@pytest.fixture
async def channel(server: ManagerServer) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield channel


@pytest.fixture
async def stub(channel: grpc.aio.Channel) -> AsyncIterator[cache_pb2_grpc.CacheServiceStub]:
    """The service; `Check` answers that all laws hold at the end of every test."""
    stub = cache_pb2_grpc.CacheServiceStub(channel)
    yield stub
    assert list((await stub.Check(pb.CheckRequest())).violations) == []


@pytest.fixture
async def worker(stub: cache_pb2_grpc.CacheServiceStub) -> Worker:
    return await Worker.begin(stub, registration())
