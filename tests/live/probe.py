"""How soon a new request is granted blocks: asked of a worker itself, so that no client's patience is in the figure."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import grpc

from kvpool.v1 import worker_pb2
from tests.cluster.cluster import Cluster

PAUSE_SECONDS = 0.02


async def first_grant(cluster: Cluster, name: str) -> float:
    """Ask the worker until it has a block table for a request that it has never seen: when, in monotonic seconds.

    A worker says so with the usage, before it computes anything.
    """
    while True:
        identity = str(uuid4())
        request = worker_pb2.GenerateRequest(sequence_id=identity, attempt=1, tenant_salt=identity)
        request.token_ids.ids.extend(range(1, 10))
        request.stop.max_tokens = 1
        granted_at: float | None = None
        try:
            async for message in cluster.worker_stub(name).Generate(request):
                if message.HasField("usage") and granted_at is None:
                    granted_at = time.monotonic()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        if granted_at is not None:
            return granted_at
        await asyncio.sleep(PAUSE_SECONDS)
