"""Two simulated processes and a call from the one to the other, which answers what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from kvpool.v1 import worker_pb2, worker_pb2_grpc
from tests.simulation.channel import Channel
from tests.simulation.process import Process
from tests.simulation.rpc import Methods
from tests.simulation.world import World

ADDRESS = "server:1"
REFUSED = 99
"""A request that the server answers with a status, which ends the call."""


class _Echo(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each request with its number, until there are no more requests."""

    def __init__(self, *, is_patient: bool) -> None:
        """`is_patient`: the call goes on after the last request."""
        self.calls: list[list[int | str]] = []
        """What each call has seen, in order."""
        self._is_patient = is_patient

    async def GenerateMany(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.GenerateManyResponse]:
        seen: list[int | str] = []
        self.calls.append(seen)
        context.add_done_callback(lambda _: seen.append("done"))
        numbers: asyncio.Queue[int | None] = asyncio.Queue()
        self.reading = asyncio.create_task(self._read(request_iterator, seen, numbers))
        try:
            while (number := await numbers.get()) is not None or self._is_patient:
                if number == REFUSED:
                    context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
                    context.set_trailing_metadata(())
                    return
                if number is not None:
                    yield worker_pb2.GenerateManyResponse(answers=[worker_pb2.Answer(number=number)])
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def _read(self, requests: Any, seen: list[int | str], numbers: asyncio.Queue[int | None]) -> None:
        try:
            async for request in requests:
                seen.append(request.number)
                numbers.put_nowait(request.number)
            seen.append("no more requests")
        except grpc.aio.UsageError:
            seen.append("read too late")
        numbers.put_nowait(None)


class Pair:
    """Two processes, and a call from the one to the other."""

    def __init__(self, world: World, *, is_patient: bool, timeout: float | None) -> None:
        self.world, self.kernel, self.bus = world, world.kernel, world.bus
        self._is_patient = is_patient
        self.bus.machines[ADDRESS] = "server"
        self.server, self.echo = self.start_server()
        self.client = Process(world, "client", "client")
        world._processes.append(self.client)
        self.answers: list[int] = []
        self.end: BaseException | str | None = None
        """How the call has ended for its caller."""
        self.iterator_end: BaseException | None = None
        self.client.deliver(self._begin, timeout)

    def start_server(self) -> tuple[Process, _Echo]:
        """Another life of it."""
        server, methods = Process(self.world, "server", "server"), Methods()
        echo = _Echo(is_patient=self._is_patient)  # type: ignore[abstract]
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(echo, methods)  # type: ignore[arg-type]
        server.handlers = methods.handlers
        self.bus.endpoints[ADDRESS] = server
        self.world._processes.append(server)
        return server, echo

    def _begin(self, timeout: float | None) -> None:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(Channel(self.bus, self.client, ADDRESS))  # type: ignore[arg-type]
        self._outgoing: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.call = stub.GenerateMany(self._requests(), timeout=timeout)
        self.reading = self.client.loop.create_task(self._read())

    async def _requests(self) -> AsyncIterator[worker_pb2.GenerateManyRequest]:
        try:
            while (number := await self._outgoing.get()) is not None:
                if isinstance(number, Exception):
                    raise number
                yield worker_pb2.GenerateManyRequest(number=number)
        except BaseException as error:
            self.iterator_end = error
            raise

    async def _read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.answers += [answer.number for answer in message.answers]
            self.end = "EOF"
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            self.end = error

    def send(self, *numbers: int | Exception | None) -> None:
        """Give the iterator its next requests; None ends it."""
        for number in numbers:
            self.client.deliver(self._outgoing.put_nowait, number)

    def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        """Let things happen."""
        end = self.kernel.now + seconds
        while not condition():
            assert self.kernel.step(), "nothing is going to happen"
            assert self.kernel.now < end, "it does not come to that"
            assert self.world.violation is None, self.world.violation

    def settle(self) -> None:
        """Let all happen that is under way."""
        while self.kernel.step():
            assert self.world.violation is None, self.world.violation

    @property
    def seen(self) -> list[int | str]:
        """By the first call of the server."""
        return self.echo.calls[0]

    @property
    def code(self) -> grpc.StatusCode:
        """With which the call has ended."""
        assert isinstance(self.end, grpc.aio.AioRpcError)
        return self.end.code()

    def nothing_is_left(self) -> bool:
        """Of a call that has ended: no task at either end, no entry at the bus."""
        return not self.bus.open_calls and not any(
            asyncio.all_tasks(process.loop) for process in (self.client, self.server)
        )


@contextmanager
def pair(seed: int = 1, *, is_patient: bool = False, timeout: float | None = None) -> Iterator[Pair]:
    """Wind the world up in the end."""
    world = World(seed)
    try:
        yield Pair(world, is_patient=is_patient, timeout=timeout)
    finally:
        world._wind_up()
