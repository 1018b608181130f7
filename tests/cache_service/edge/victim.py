"""A worker that others try to harm: what can be seen of it, what it is in the manager, and that it goes on as before."""

from __future__ import annotations

import math
from typing import Any

from kvpool.cache_service.server import ManagerServer
from kvpool.v1 import cache_pb2 as pb
from kvpool.v1 import cache_pb2_grpc
from tests.cache_service.core.lockstep import snapshot
from tests.cache_service.edge.peer import BLOCK_SIZE, Worker, item, prompt, tokens, update


async def seen(stub: cache_pb2_grpc.CacheServiceStub, worker_id: str = "w") -> pb.WorkerDescription:
    """All that anybody can see of a worker."""
    request = pb.DescribeRequest(worker_id=worker_id, include_blocks=True, max_sequences=50)
    return (await stub.Describe(request)).workers[0]


async def busy(worker: Worker) -> None:
    """It gets a sequence that decodes, and a reserve of which it has not heard yet."""
    await worker.allocate(item("a", prompt(2 * BLOCK_SIZE)), wish=3)


def state_of(server: ManagerServer) -> Any:
    """All of the manager that a message could change. From now on the manager's own pauses on a busy machine are not added to its
    leases."""
    manager = server.manager
    manager._tick_seconds = math.inf
    return snapshot(manager), manager.worker("w").draining, manager.epoch, len(manager.sessions)


async def goes_on(worker: Worker) -> None:
    """A busy one hears what it has not heard, its block is sealed under its own tokens, and serves the next sequence."""
    worker.downlink_ack = (await worker.keep_alive()).downlink.entries[-1].number
    appended = await worker.append(update("a", 2 * BLOCK_SIZE, start=2 * BLOCK_SIZE, tokens=tokens(7)))
    assert appended.results[0].num_sealed_tokens == 2 * BLOCK_SIZE
    await worker.free(update("a"))
    assert (await worker.grant("b", prompt(2 * BLOCK_SIZE) + tokens(7))).num_cached_tokens == 2 * BLOCK_SIZE
