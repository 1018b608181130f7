"""Checks every call before its servicer: the size of the request, then whether it parses.

gRPC's own parser answers malformed bytes with UNKNOWN and a traceback in the log, and has one limit for all methods. So the
handlers get raw bytes here, and a method without a limit of its own has a small one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.rpc import code_pb2

from kvpool.protocol.status import build_status

from .call_status import set_status
from .heap import Heap
from .rare_line import RareLine

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.server")

MALFORMED: Final = "MALFORMED"
"""`ErrorInfo.reason` of a request that cannot be parsed."""
TOO_LARGE: Final = "TOO_LARGE"
"""`ErrorInfo.reason` of a request over the limit of its method."""

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]


class RequestLimit(NamedTuple):
    """Largest request of one method."""

    num_bytes: int
    cure: str = "send less in one request"
    """Advice to the caller or the operator, for the error message."""


SMALL: Final = RequestLimit(4 << 10)
"""Limit of methods without one of their own: health checks, reflection, and methods added without a limit."""


class _RefusedRequest(Exception):
    """A request is refused before its servicer sees it."""

    def __init__(self, reason: str, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = build_status(code_pb2.INVALID_ARGUMENT, reason, message, metadata=metadata)


class RequestGuard(grpc.aio.ServerInterceptor):
    """Checks requests before the servicers of one gRPC server see them, and counts the calls in flight."""

    def __init__(self, complaints: RareLine | None = None) -> None:
        self._limits: Mapping[str, RequestLimit] = {}
        self._on_refused: Callable[[str, str], None] = lambda method, reason: None
        self._complaints = complaints or RareLine(log, "requests refused before they were read")
        self._guarded: dict[str, Handler] = {}
        self._heap = Heap()
        self.num_calls = 0
        """Calls in flight."""
        self._idle = asyncio.Event()
        self._idle.set()

    def protect(self, limits: Mapping[str, RequestLimit], on_refused: Callable[[str, str], None] | None = None) -> None:
        """Set the limits by full method name ("/package.Service/Method"), before the server starts. `on_refused` is called with the
        full name and the reason of every request that is refused here."""
        self._limits = limits
        if on_refused is not None:
            self._on_refused = on_refused

    async def wait_until_idle(self) -> None:
        """Wait until no call is in flight, or until `stop_waiting`."""
        await self._idle.wait()

    def stop_waiting(self) -> None:
        """End `wait_until_idle`, whatever is in flight."""
        self._idle.set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the guarded handler of a method, the same one for each call."""
        method = handler_call_details.method
        guarded = self._guarded.get(method)
        if guarded is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # not a method of this server: peers may invent any number of names, so it is not kept
            guarded = self._guarded[method] = self._guard(method, handler)
        return guarded

    def _guard(self, method: str, handler: Handler) -> Handler:
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        limit = self._limits.get(method, SMALL)

        def parse(raw: bytes) -> Any:
            self._heap.after_request(len(raw))
            return _parse(method, limit, raw, handler.request_deserializer)

        async def parse_each(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for raw in requests:
                yield parse(raw)

        read: Callable[[Any], Any] = parse_each if handler.request_streaming else parse

        async def answer_once(request: Any, context: Context) -> Any:
            return await self._run(method, context, lambda: behaviour(read(request), context))

        async def answer_in_parts(request: Any, context: Context) -> None:
            async def write_all() -> None:
                # Here and not by gRPC, which leaves a generator whose caller has gone to the garbage collector.
                async with contextlib.aclosing(behaviour(read(request), context)) as messages:
                    async for message in messages:
                        await context.write(message)

            await self._run(method, context, write_all)

        guarded = answer_in_parts if inspect.isasyncgenfunction(behaviour) else answer_once
        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrapped: Handler = make(guarded, None, handler.response_serializer)
        return wrapped

    async def _run(self, method: str, context: Context, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self.num_calls += 1
        self._idle.clear()
        try:
            return await work()
        except _RefusedRequest as refused:
            self._complaints.note(method=method, reason=refused.reason, peer=context.peer(), message=str(refused))
            self._on_refused(method, refused.reason)
            set_status(context, refused.status)
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not context.code():
                raise
            # The servicer has given the call a status and cancelled it, because its reader may take nothing.
            task.uncancel()
            return None
        except NotImplementedError:
            # A generated servicer raises it for a method that is not implemented, e.g. List of grpcio's health service. gRPC would
            # log a traceback for each call.
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            context.set_details(f"{method} is not in this version")
            return None
        finally:
            self.num_calls -= 1
            if not self.num_calls:
                self._idle.set()


def _parse(method: str, limit: RequestLimit, raw: bytes, deserializer: Callable[[bytes], Any] | None) -> Any:
    """Parse `raw`. Raises _RefusedRequest."""
    name = method.rpartition("/")[2]
    if len(raw) > limit.num_bytes:
        raise _RefusedRequest(
            TOO_LARGE,
            f"a request of {name} may have {limit.num_bytes} bytes, this one has {len(raw)}: {limit.cure}",
            {"num_bytes": str(len(raw)), "max_bytes": str(limit.num_bytes)},
        )
    if deserializer is None:
        return raw
    try:
        return deserializer(raw)
    except DecodeError:
        raise _RefusedRequest(
            MALFORMED,
            f"needed a request of {name} as kvpool's protos define it, got {len(raw)} bytes that are none: generate the caller's "
            "code from the protos of this version",
        ) from None
