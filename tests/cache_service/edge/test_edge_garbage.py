"""The process runs without automatic garbage collection: gRPC's cycles are taken away young.

That the core leaves none: core/test_core_past_mistakes.py.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc

from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.edge.peer import refused

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
