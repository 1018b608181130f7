"""The process runs without automatic garbage collection: the core leaves no cycles, and gRPC's are taken away young."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import (
    AllocateItem,
    AppendItem,
    PoolConfig,
    Registration,
    Root,
    SequenceKey,
    SequenceUpdate,
    TableEntry,
    Uplink,
    WorkerLoad,
)
from kvpool.cache_service.garbage import collect_young
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import prompt, refused

ROOT = Root("model-a")


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Automatic collection off, as in the manager's process, and nothing left to collect."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run_workload(manager: CacheManager) -> None:
    """A life in which everything happens: hits, waits, eviction, refusals, sealing, fencing, leases, deregistering, sweeps."""
    for life in range(3):
        for worker_id in ("v", "w"):
            pool = PoolConfig(4, 17)
            manager.register(Registration(worker_id, 1, life + 1, "a:1", "m", "model-a", pool), float(life))
        first, second = manager.sessions
        for call_no in range(1, 40):
            session = (first, second)[call_no % 2]
            key = SequenceKey(f"s{call_no}", 1 + call_no % 3, 0)
            shared = prompt(8) + prompt(1 + call_no % 20, first=100 * (call_no % 7))
            items = [
                AllocateItem(key, ROOT, shared, 4, no_wait=call_no % 4 > 0),
                AllocateItem(SequenceKey("never", 1, 0), ROOT, prompt(100)),
                AllocateItem(SequenceKey("bad", 0, 0), ROOT, b"\1"),
                AllocateItem(SequenceKey("full", 1, 0), ROOT, prompt(56, first=call_no)),
                AllocateItem(SequenceKey("behind", 1, 0), ROOT, prompt(4)),
            ]
            manager.allocate(Uplink(session.number, 3 * call_no, 0, 2), items)
            update = SequenceUpdate(key, len(shared) // 4, prompt(2), len(shared) // 4, (TableEntry(9, 9, 9),))
            updates = [update, update._replace(bound=()), update._replace(start=99)]
            manager.append(Uplink(session.number, 3 * call_no + 1), [AppendItem(update) for update in updates])
            if call_no % 5:
                manager.free(Uplink(session.number, 3 * call_no + 2), [update, update._replace(bound=())])
            manager.keep_alive(session.number, session.downlink.last_number, WorkerLoad(), float(life))
        manager.route(ROOT, prompt(30))
        manager.describe_blocks("w")
        assert manager.check().violations == []
    manager.deregister(manager.sessions[0].number)
    for now in range(3, 20):
        manager.tick(now / 2)
    assert not manager.sessions
    while manager.sweep():
        pass
    assert manager.check().violations == []
    assert manager.num_prefix_nodes == 0


def test_the_core_leaves_no_cycles(collector_off: None) -> None:
    manager = CacheManager(1)
    run_workload(manager)
    assert gc.collect() == 0
    del manager
    assert gc.collect() == 0


class Cycle:
    """What gRPC leaves behind."""

    def __init__(self) -> None:
        self.itself = self


def test_young_cycles_go_and_automatic_collection_stays_off(collector_off: None) -> None:
    for _ in range(100):
        Cycle()
    collect_young()
    assert not gc.isenabled()
    assert gc.collect() == 0


_SCRIPT = """
import asyncio, gc, sys
from pathlib import Path
from kvpool.cache_service import __main__ as process
from kvpool.cache_service.epoch import EpochStore
from kvpool.cache_service.server import Server
from kvpool.cache_service.settings import ManagerSettings

async def main(folder):
    settings = ManagerSettings(port=0, state_dir=folder, lease_seconds=1, keep_alive_seconds=0.04)
    async with Server(settings, EpochStore.open(Path(folder))) as server:
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
            await refused(stub.KeepAlive(pb.KeepAliveRequest()), grpc.StatusCode.FAILED_PRECONDITION, "STALE_SESSION")

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
