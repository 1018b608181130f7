"""A forked service is the service that its command starts."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest

from tests.client.processes import descendants, is_alive
from tests.cluster.cluster import Cluster, free_port
from tests.cluster.fork_server import MANAGER_MODULE, WORKER_MODULE, ForkServer
from tests.cluster.process import Process, computing, environment_with
from tests.until import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which services get."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "arguments", "status"),
    [
        (MANAGER_MODULE, ("--help",), 0),
        (MANAGER_MODULE, ("--prot", "1"), 2),
        (WORKER_MODULE, ("--model", "no/folder", "--dry-run"), 1),
    ],
)
async def test_it_prints_and_returns_what_its_command_does(
    folder: Path, module: str, arguments: tuple[str, ...], status: int
) -> None:
    outputs = []
    for may_fork in (True, False):
        log = folder / f"{may_fork}.log"
        process = Process("service", ["-m", module, *arguments], log, computing(1), may_fork=may_fork)
        assert is_forked(process) == may_fork
        assert await process.ended(60.0) == status
        outputs.append(re.sub(r"\d{4}-\d\d-\d\dT\S+Z", "TIME", process.log))
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
async def test_it_ends_by_signals(folder: Path, number: signal.Signals, status: int) -> None:
    async with Cluster(folder) as cluster:
        manager = await cluster.start_manager()
        assert is_forked(manager)
        manager.send(number)
        assert await manager.ended() == status
        manager.send(signal.SIGKILL)  # to nothing
        assert manager.status == status
        assert "listening" in manager.log


def is_forked(process: Process) -> bool:
    """Whether it is not a child of this process."""
    return process.pid not in descendants(os.getpid())


async def test_it_has_the_working_directory_and_the_limit_of_files_of_now(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
    try:
        async with Cluster(folder) as cluster:
            pid = (await cluster.start_manager()).pid
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (before[0] - 1, before[1])
            assert os.readlink(f"/proc/{pid}/cwd") == os.fspath(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_only_services_in_the_environment_of_the_server_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have read theirs when they were imported. The name of the test is in it, and is of no importance."""
    server = Process.fork_server
    assert server is not None
    assert server.can_start(WORKER_MODULE, environment_with(computing(1)))
    assert not server.can_start(WORKER_MODULE, environment_with(computing(2)))
    assert not server.can_start("kvpool.cli", environment_with(computing(1)))
    monkeypatch.setenv("KVPOOL_WORKER_NUM_BLOCKS", "7")
    assert not server.can_start(WORKER_MODULE, environment_with(computing(1)))


async def test_services_end_with_their_server(folder: Path) -> None:
    server = ForkServer(environment_with({}), modules=[MANAGER_MODULE])
    flags = ["--port", str(free_port()), "--state-dir", str(folder / "state")]
    try:
        manager = server.start(MANAGER_MODULE, flags, folder / "manager.log")
        assert manager.poll() is None
    finally:
        server.stop()
    await until(lambda: not is_alive(manager.pid))
