"""Every RPC that a manager and a worker answer, read from the descriptors: a new RPC is attacked from its first day."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvpool.v1 import cache_pb2, worker_pb2

_EVERYWHERE: tuple[Any, ...] = (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)


@dataclass(frozen=True)
class Rpc:
    """One method of a service."""

    path: str
    """As it is called: /package.Service/Method."""
    request: Descriptor
    client_streams: bool
    server_streams: bool

    @property
    def name(self) -> str:
        """Without the service."""
        return self.path.rpartition("/")[2]


def _rpcs(files: tuple[Any, ...]) -> Iterator[Rpc]:
    for file in files:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield _rpc(f"/{service.full_name}/{method.name}", method)


def _rpc(path: str, method: MethodDescriptor) -> Rpc:
    return Rpc(path, method.input_type, method.client_streaming, method.server_streaming)


def manager_rpcs() -> list[Rpc]:
    """Of the manager: its own, health and reflection."""
    return list(_rpcs((cache_pb2.DESCRIPTOR, *_EVERYWHERE)))


def worker_rpcs() -> list[Rpc]:
    """Of a worker: its own, health and reflection."""
    return list(_rpcs((worker_pb2.DESCRIPTOR, *_EVERYWHERE)))
