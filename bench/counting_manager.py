"""The real manager process, with one addition: it prints a line per RPC, so that a benchmark can count them by kind.

python -m bench.counting_manager [arguments of kvpool.cache_service]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvpool.cache_service.__main__ import main

PREFIX = "rpc "


class _Counter(grpc.aio.ServerInterceptor):
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        print(f"{PREFIX}{handler_call_details.method.rpartition('/')[2]}", flush=True)
        return await continuation(handler_call_details)


if __name__ == "__main__":
    # The manager has no setting for interceptors and needs none; this is the one place that wants one.
    grpc.aio.server = functools.partial(grpc.aio.server, interceptors=(_Counter(),))
    sys.exit(main())
