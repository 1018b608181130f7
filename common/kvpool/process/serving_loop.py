"""grpc.aio's server with a serving loop that no request can end.

The loop of grpcio 1.85 has two defects. It decodes the path of each request whose method is not registered, so that a path that is
not UTF-8 ends the loop, and with it the server. And a loop that ends frees what gRPC's core still holds for the registered methods
(one pending request for each), which the core then writes to: the process may crash at any later moment.

Here each registered method has a task that asks the core for its calls, and one more task refuses all other calls without reading
their paths. Nothing is freed before the core has given it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from grpc._cython import cygrpc
from grpc.aio import _server

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Handler = Any

KNOWN_GRPCIO: Final = ("1.85.",)
"""Prefixes of the versions whose inner names and arguments are the ones used here. With others `OnlyGenericServer` serves."""
UNKNOWN_METHOD: Final = "(unknown)"
"""Name in place of one that is not read."""


def is_steady() -> bool:
    """Whether this module replaces the loop of the installed grpcio."""
    return grpc.__version__.startswith(KNOWN_GRPCIO)


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """Make a server, to which generated code adds servicers (`add_..._to_server`). Call it in an event loop."""
    if is_steady():
        return SteadyServer(interceptors, options)  # type: ignore[return-value]
    return OnlyGenericServer(None, (), tuple(interceptors), tuple(options), None, None)  # type: ignore[return-value]


class SteadyServer(_server.Server):
    """Serves registered methods only, for ever. A generic handler is never asked."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        # Not the base's: it would create the server that is replaced here, and gRPC's core frees none that was not started.
        self._loop = cygrpc.get_working_loop()
        self._server = _SteadyCore(self._loop, tuple(interceptors), tuple(options))


class OnlyGenericServer(_server.Server):
    """grpc.aio's own server without registered methods. Its loop then has only one pending request, which is back whenever a path
    ends the loop. So such an end costs the server, but never the process."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """Do nothing: generated code gives the same handlers to `add_generic_rpc_handlers` too."""


class _Resolver:
    """Finds the handler of a registered method."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    def resolve_handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        return self._handlers.get(details.method)


class _SteadyCore(cygrpc.AioServer):  # type: ignore[misc]
    """Replaces how calls are requested from gRPC's core; all else is grpcio's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interceptors: tuple[grpc.aio.ServerInterceptor, ...],
        options: tuple[tuple[str, Any], ...],
    ) -> None:
        # No thread pool, because all handlers are coroutines; no generic handlers; no limit on calls at the same time.
        super().__init__(loop, None, (), interceptors, options, None)
        self._handlers: dict[str, Handler] = {}
        self._asked_interceptors = interceptors
        self._calls: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, method_handlers: dict[str, Handler]) -> None:
        super().add_registered_method_handlers(method_handlers)
        self._handlers.update(method_handlers)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[NoReturn]:
        """Start a task that serves the calls of `method`; None: of all unregistered methods. grpcio's loop requests a future for
        each registered method and one for all others, and would serve the call that is its result. The future has no result, so the
        loop only waits for the shutdown."""
        name = UNKNOWN_METHOD if method is None else method.decode()
        if method is None:
            serving = self._serve(name, lambda: self._request_call(), _Resolver({}), ())
        else:
            serving = self._serve(
                name, lambda: self._request_registered_call(method), _Resolver(self._handlers), self._asked_interceptors
            )
        task = asyncio.create_task(serving, name=f"serve {name}")
        task.add_done_callback(_retrieve)
        # If grpcio's loop ends nevertheless it cancels what it waits for. What the core writes to belongs to the task.
        return asyncio.shield(task)

    async def _serve(
        self,
        method: str,
        next_call: Callable[[], Awaitable[Any]],
        resolver: _Resolver,
        interceptors: tuple[grpc.aio.ServerInterceptor, ...],
    ) -> NoReturn:
        """Serve the calls of a method until the server is shut down; then raises the error that grpcio's loop expects."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                state = await next_call()
            except cygrpc._RequestCallError:
                if self.is_running():
                    continue
                raise
            handling = cygrpc._handle_rpc(method, resolver, interceptors, state, loop, False)
            call = loop.create_task(cygrpc._schedule_rpc_coro(handling, state, loop, method), name="rpc_task")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)


def _retrieve(task: asyncio.Task[NoReturn]) -> None:
    """Retrieve the exception, so that asyncio does not log it: it is meant for grpcio's loop, which may have ended."""
    if not task.cancelled():
        task.exception()
