"""A gRPC server between peers and the manager: it doubles, delays and reorders whole unary calls, and writes down what happens.

What it writes down is what reaches the manager: each copy of a call is a call of its own. `sent` is taken before the copy leaves
the proxy, `answered` after its answer has come back, on one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc

from kvpool.v1 import cache_pb2
from tests.linearizability.history import NEVER, Answer, Operation, Unknown, answer_of, failure
from tests.rich_status import status_of
from tests.service_messages import REQUESTS, RESPONSES

SERVICE = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name


class Weather(NamedTuple):
    """How bad the way to the manager is."""

    doubled: float = 0.15
    """Probability that a call reaches the manager twice."""
    unanswered: float = 0.02
    """Probability that nobody learns the answer to a copy, neither the peer nor the history."""
    delay_seconds: float = 0.004
    """Longest delay of a copy before it leaves, and of its answer."""


class _Outcome(NamedTuple):
    response: bytes = b""
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    trailing_metadata: tuple[Any, ...] = ()


class Proxy:
    """Listens on a free port of loopback and forwards to `manager_port`."""

    def __init__(self, manager_port: int, weather: Weather, seed: int) -> None:
        self.history: list[Operation] = []
        self.port = 0
        self._weather = weather
        self._random = random.Random(seed)
        self._now = 0
        self._late: set[asyncio.Task[_Outcome]] = set()
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{manager_port}", options=[("grpc.enable_retries", 0), ("grpc.enable_http_proxy", 0)]
        )
        self._calls: dict[str, Any] = {name: self._channel.unary_unary(f"/{SERVICE}/{name}") for name in REQUESTS}
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name)) for name in REQUESTS
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def __aenter__(self) -> Proxy:
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await asyncio.gather(*self._late)
        await self._server.stop(1)
        await self._channel.close()

    def _handler(self, name: str) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(request: bytes, context: grpc.aio.ServicerContext[bytes, Any]) -> bytes:
            copies = [self._forward(name, request)]
            if self._random.random() < self._weather.doubled:
                copies.append(self._forward(name, request))
            tasks = [asyncio.create_task(copy) for copy in copies]
            self._late.update(tasks)
            for task in tasks:
                task.add_done_callback(self._late.discard)
            # The peer hears whichever answer comes first; the other copy may still be on its way.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            outcome = next(iter(done)).result()
            if outcome.code is not grpc.StatusCode.OK:
                context.set_code(outcome.code)
                context.set_details(outcome.details)
                context.set_trailing_metadata(outcome.trailing_metadata)
            return outcome.response

        return handle

    async def _delay(self) -> None:
        await asyncio.sleep(self._random.random() ** 2 * self._weather.delay_seconds)

    async def _forward(self, name: str, request: bytes) -> _Outcome:
        """Send one copy on and write down what becomes of it."""
        is_unanswered = self._random.random() < self._weather.unanswered
        await self._delay()
        sent = self._tick()
        answer: Answer
        try:
            response = await self._calls[name](request)
        except grpc.aio.AioRpcError as error:
            # Whatever else goes wrong between two ends of loopback is raised.
            if not (status := status_of(error)).details:
                raise
            answer = failure(status)
            outcome = _Outcome(b"", error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
        else:
            answer = answer_of(name, RESPONSES[name].FromString(response))
            outcome = _Outcome(response)
        if is_unanswered:
            answer = Unknown()
            outcome = _Outcome(b"", grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        answered = NEVER if is_unanswered else self._tick()
        message = REQUESTS[name].FromString(request)
        self.history.append(Operation(len(self.history), name, message, sent, answered, answer))
        await self._delay()
        return outcome

    def _tick(self) -> int:
        self._now += 1
        return self._now
