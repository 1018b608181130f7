"""A worker that is none: it registers, has a session of its own, and says in it what it likes."""

from __future__ import annotations

import itertools
import time
from typing import Any, Self

import grpc

from kvpool.v1 import cache_pb2, cache_pb2_grpc
from tests.cache_service.edge import peer
from tests.hostile.arena import CALL_SECONDS

FINGERPRINT = "stranger"
"""Of no model that anybody serves, so that no client is sent here."""

_numbers = itertools.count(1)


def registration(worker_id: str = "", **fields: Any) -> cache_pb2.RegisterRequest:
    """A Register that is in order, apart from `fields`; under a name that nobody has if none is given."""
    own = {"incarnation": time.time_ns(), "num_blocks": 257, "model_fingerprint": FINGERPRINT}
    request = peer.registration(worker_id or f"stranger-{next(_numbers)}", **{**own, **fields})
    request.ClearField("process_key")
    return request


class Stranger(peer.Worker):
    """Its session, and what it has reported there. `fields` are those of its Register. All calls raise AioRpcError."""

    seconds = CALL_SECONDS

    def __init__(self, channel: grpc.aio.Channel, worker_id: str = "", **fields: Any) -> None:
        super().__init__(cache_pb2_grpc.CacheServiceStub(channel), registration(worker_id, **fields))
        self.part = 0
        """The next one of its report."""

    @classmethod
    async def begin_on(cls, channel: grpc.aio.Channel) -> Self:
        stranger = cls(channel)
        await stranger.register()
        return stranger

    async def report_next(self, *, last: bool = False) -> None:
        """State what it holds, as after a restart of the manager: the first part is live, the others have one content each."""
        request = cache_pb2.ReportRequest(uplink=self.uplink(), part=self.part, live=not self.part, last=last)
        if self.part:
            run = request.contents.add(tokens=self.part.to_bytes(4, "little") * peer.BLOCK_SIZE)
            run.root.model_fingerprint = FINGERPRINT
            run.blocks.append(peer.run(0, [0], [0]))
        await self.stub.Report(request, timeout=self.seconds)
        self.part += 1
