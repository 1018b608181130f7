"""Refuses every call while another process leads. When this one leads, the servicer of its life answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import grpc

from kvpool.process.call_status import set_status
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from . import status

Context = grpc.aio.ServicerContext[Any, Any]


class LeaderGate:
    """The RPCs of a process that stands by. Has the methods of a CacheServiceServicer."""

    def __init__(self) -> None:
        self.leading: cache_pb2_grpc.CacheServiceServicer | None = None
        """Servicer that answers when this process leads; None before that."""


def _unary(name: str) -> Callable[[LeaderGate, Any, Context], Awaitable[Any]]:
    async def answer(self: LeaderGate, request: Any, context: Context) -> Any:
        if self.leading is None:
            set_status(context, status.of_standby())
            return cast(Any, None)  # which gRPC does not send, the status not being OK
        return await getattr(self.leading, name)(request, context)

    return answer


def _stream(name: str) -> Callable[[LeaderGate, Any, Context], AsyncGenerator[Any, None]]:
    async def answer(self: LeaderGate, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        if self.leading is None:
            set_status(context, status.of_standby())
            return
        async with contextlib.aclosing(getattr(self.leading, name)(request, context)) as messages:
            async for message in messages:
                yield message

    return answer


for _method in cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods:
    _make = _stream if _method.server_streaming else _unary
    setattr(LeaderGate, _method.name, _make(_method.name))
