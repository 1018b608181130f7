"""Refuses every call while another process leads. When this one leads, the servicer of its life answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc

from kvpool.process.call_status import set_status
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from . import status

Context = grpc.aio.ServicerContext[Any, Any]


class LeaderGate(SimpleNamespace):
    """The RPCs of a process that stands by: a table of the methods of a CacheServiceServicer."""

    leading: cache_pb2_grpc.CacheServiceServicer | None
    """Servicer that answers when this process leads; None before that."""

    def __init__(self) -> None:
        methods = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].methods
        answers = {method.name: self._stream if method.server_streaming else self._unary for method in methods}
        super().__init__(leading=None, **{name: answer(name) for name, answer in answers.items()})

    def _unary(self, name: str) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            if self.leading is None:
                set_status(context, status.of_standby())
                return cast(Any, None)  # which gRPC does not send, the status not being OK
            return await getattr(self.leading, name)(request, context)

        return answer

    def _stream(self, name: str) -> Callable[[Any, Context], AsyncGenerator[Any, None]]:
        async def answer(request: Any, context: Context) -> AsyncGenerator[Any, None]:
            if self.leading is None:
                set_status(context, status.of_standby())
                return
            async with contextlib.aclosing(getattr(self.leading, name)(request, context)) as messages:
                async for message in messages:
                    yield message

        return answer
