"""The process: how it starts, how it says no, how it stops, and how it comes back."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest

from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.managers import Managers
from tests.cache_service.edge.peer import Worker, prompt, refused, registration
from tests.cluster.cluster import free_port

NO_ELECTIONS = ("etcd:1.2.3.4:2379", "kubernetes:", "kubernetes:name", "files")


async def test_it_serves_stops_at_sigterm_and_comes_back_from_a_kill_with_a_larger_epoch(
    tmp_path: Path, managers: Managers
) -> None:
    """The sessions of a life are none of the next one."""
    before = pb.RegisterResponse()
    for life, number in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGINT), start=1):
        with managers.serving(tmp_path) as (process, address, line):
            assert line["epoch"] == life
            async with grpc.aio.insecure_channel(address) as channel:
                worker = Worker(cache_pb2_grpc.CacheServiceStub(channel), registration())
                worker.registered = before
                await refused(worker.allocate(), "STALE_SESSION")
                worker.request.highest_epoch_seen = before.epoch
                registered = await worker.register()
                assert (registered.epoch, registered.session > before.session) == (life, True)
                await worker.grant("a", prompt(9))
                before = registered
            process.send(number)
            assert process.wait() == {signal.SIGTERM: 0, signal.SIGKILL: -9, signal.SIGINT: 130}[number]
            events = [line["event"] for line in process.lines()]
            assert events == ["worker registered"] + ([] if number == signal.SIGKILL else ["stopped"])


async def call_for_ever(worker: Worker) -> None:
    """Ends with the first call that fails."""
    while True:
        await worker.keep_alive()


async def test_it_stops_while_a_worker_goes_on_calling(tmp_path: Path, managers: Managers) -> None:
    """The worker hears that the manager goes, not that a connection broke, and it goes at once."""
    with managers.serving(tmp_path) as (process, address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            worker = await Worker.begin(cache_pb2_grpc.CacheServiceStub(channel), registration())
            process.send(signal.SIGTERM)
            found = await refused(call_for_ever(worker), "RECOVERING")
            assert "shutting down" in found.message
        assert process.wait() == 0


def test_two_managers_on_one_state_directory_or_port_are_told_apart(tmp_path: Path, managers: Managers) -> None:
    with managers.serving(tmp_path / "a") as (process, address, _):
        code, said = managers.fails("--port", "0", "--state-dir", str(tmp_path / "a"))
        assert (code, said.count("\n")) == (1, 1)
        assert f"{tmp_path / 'a'} is held by another manager (pid {process.pid})" in said
        assert "--state-dir" in said
        port = address.rpartition(":")[2]
        code, said = managers.fails("--port", port, "--state-dir", str(tmp_path / "b"))
        assert (code, said.count("\n")) == (1, 1)
        assert f"port {port}: it is in use" in said
        code, said = managers.fails("--port", "0", "--metrics-port", port, "--state-dir", str(tmp_path / "b"))
        assert code == 1
        assert f"127.0.0.1:{port}: " in said
        assert "--metrics-port" in said


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "says"),
    [
        (["--state-dir", "/proc/nowhere"], {}, 1, "state directory /proc/nowhere cannot be used"),
        (["--host", "no.such.host.invalid"], {}, 1, "cannot listen on host 'no.such.host.invalid'"),
        (["--host", "192.0.2.1", "--port", "0"], {}, 1, "Cannot assign requested address"),
        (["--port", "65536"], {}, 2, "port: Input should be less than or equal to 65535"),
        (["--port", "many"], {}, 2, "port: Input should be a valid integer"),
        ([], {"KVPOOL_MANAGER_PORT": "many"}, 2, "KVPOOL_MANAGER_PORT: Input should be a valid integer"),
        (["--lease-seconds", "1"], {}, 2, "must be at most half of lease_seconds (1)"),
        *((["--election", election], {}, 2, "election") for election in NO_ELECTIONS),
        (["--election", "kubernetes:default/kvpool"], {}, 1, "--kubernetes-api"),  # outside a pod
        (["--log-format", "xml"], {}, 2, "--log-format: Input should be 'console' or 'json'"),
        (["--stat-dir", "x"], {}, 2, "kvpool manager: there is no flag --stat-dir; did you mean --state-dir?"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    tmp_path: Path, managers: Managers, arguments: list[str], variables: dict[str, str], code: int, says: str
) -> None:
    state_dir = [] if "--state-dir" in arguments else ["--state-dir", str(tmp_path)]
    status, said = managers.fails(*arguments, *state_dir, variables=variables or None)
    assert (status, said.count("\n")) == (code, 1), said
    assert says in said


def test_variables_set_what_flags_do_not_and_the_clients_variable_is_none_of_them(
    tmp_path: Path, managers: Managers
) -> None:
    port = free_port()
    variables = {
        "KVPOOL_MANAGER": "somewhere.else:1",
        "KVPOOL_MANAGER_PORT": str(port),
        "KVPOOL_MANAGER_LEASE_SECONDS": "",
        "XDG_STATE_HOME": str(tmp_path),
    }
    with managers.listening(variables=variables) as (_, line):
        assert line["address"] == f"127.0.0.1:{port}"
        assert line["state_dir"] == str(tmp_path / "kvpool" / f"manager-{port}")


# -- garbage: there is no automatic collection, and gRPC's cycles are taken away young; the core leaves none

_SCRIPT = """
import asyncio, gc, sys
from pathlib import Path
from kvpool.cache_service import __main__ as process
from kvpool.cache_service.election.file import FileEpochs
from kvpool.cache_service.server import ManagerServer
from kvpool.cache_service.settings import ManagerSettings

async def main(folder):
    settings = ManagerSettings(port=0, state_dir=folder, lease_seconds=1, keep_alive_seconds=0.04)
    async with ManagerServer(settings, FileEpochs.open(Path(folder))) as server:
        process._switch_off_the_collector()
        print(server.port, file=sys.stderr, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(3 * settings.tick_seconds)
        print(gc.isenabled(), gc.get_freeze_count(), gc.collect(), file=sys.stderr, flush=True)

asyncio.run(main(sys.argv[1]))
"""


async def test_calls_served_and_refused_leave_nothing_behind(tmp_path: Path) -> None:
    """grpc.aio leaves 5 objects behind every call; without the young passes 8,000 would be left here.

    Young passes fall between the arrival of calls and their ends here, and what lives through one is never looked at again.
    """

    async def call(stub: cache_pb2_grpc.CacheServiceStub) -> None:
        for _ in range(100):
            await stub.Describe(pb.DescribeRequest())
            await refused(stub.KeepAlive(pb.KeepAliveRequest()), "STALE_SESSION")

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SCRIPT, str(tmp_path), stdin=pipe, stderr=pipe, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stderr is not None
        port = (await process.stderr.readline()).decode().strip()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            await asyncio.gather(*(call(stub) for _ in range(8)))
        _, said = await asyncio.wait_for(process.communicate(b"\n"), 20)
    finally:
        if process.returncode is None:
            process.kill()
    enabled, frozen, left = said.split()
    assert enabled == b"False"
    assert int(frozen) > 10_000
    assert int(left) < 100
