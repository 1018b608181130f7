"""Every RPC that a manager and a worker answer, read from the descriptors: a new RPC is attacked from its first day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvpool.v1 import cache_pb2, worker_pb2

_EVERYWHERE: tuple[Any, ...] = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


@dataclass(frozen=True)
class Rpc:
    path: str
    """As it is called: /package.Service/Method."""
    request: Descriptor
    client_streams: bool
    server_streams: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    async def call(self, channel: grpc.aio.Channel, payload: bytes, seconds: float, max_answers: int = 1) -> None:
        """Send one request of these bytes; a stream is cancelled after `max_answers`. Raises AioRpcError."""
        if not self.server_streams:
            unary: Any = channel.unary_unary(self.path)
            await unary(payload, timeout=seconds)
            return
        stream: Any = channel.stream_stream(self.path) if self.client_streams else channel.unary_stream(self.path)
        call = stream(iter([payload]) if self.client_streams else payload, timeout=seconds)
        num_answers = 0
        async for _ in call:
            num_answers += 1
            if num_answers == max_answers:
                break
        call.cancel()


def _rpcs(file: Any) -> tuple[Rpc, ...]:
    """The methods of a file's services, of health and of reflection."""
    services = [service for one in (file, *_EVERYWHERE) for service in one.services_by_name.values()]
    return tuple(
        Rpc(f"/{service.full_name}/{method.name}", method.input_type, method.client_streaming, method.server_streaming)
        for service in services
        for method in service.methods
    )


MANAGER_RPCS = _rpcs(cache_pb2.DESCRIPTOR)
WORKER_RPCS = _rpcs(worker_pb2.DESCRIPTOR)
