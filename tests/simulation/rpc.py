"""Calls over the bus, for the real stubs and the real servicers: bytes go in and bytes come out. Streams are in stream_call.py."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from google.rpc import status_pb2

from kvpool.protocol.status import reason_of

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.process import Process

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS = "grpc-status-details-bin"
_AWAITING = frozenset({"Register", "Check"})
"""Methods of the manager that may wait for something."""


class Failure(NamedTuple):
    """What a server answers instead of a response."""

    code: grpc.StatusCode
    details: str
    trailing: bytes | None = None

    def error(self) -> grpc.aio.AioRpcError:
        metadata = grpc.aio.Metadata()
        if self.trailing is not None:
            metadata.add(_DETAILS, self.trailing)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), metadata, details=self.details)


GONE = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused or reset")
EXPIRED = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Context:
    """What a servicer sees of its call."""

    def __init__(self, peer: str = "") -> None:
        self.failure: Failure | None = None
        self._peer = peer
        self._code: Any = None
        self._details = ""
        self._on_done: list[Callable[[Any], None]] = []

    def peer(self) -> str:
        """As gRPC writes it: a kind, the machine, and the connection."""
        return self._peer

    def set_code(self, code: Any) -> None:
        self._code = code if isinstance(code, grpc.StatusCode) else _CODES[int(code)]

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        trailing = next((value for key, value in metadata if key == _DETAILS), None)
        self.failure = Failure(self._code, self._details, trailing)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    def done(self) -> None:
        callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback(self)


class Methods:
    """Stands in for a gRPC server that services are added to."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers.update(handlers)


class Call:
    """One call, from the process that makes it to the one that answers."""

    def __init__(
        self,
        bus: Bus,
        process: Process,
        address: str,
        method: str,
        serializer: Callable[[Any], bytes],
        deserializer: Callable[[bytes], Any],
    ) -> None:
        self.bus = bus
        self.process = process
        self.address = address
        self.method = method
        self.serializer = serializer
        self.deserializer = deserializer
        self.target = bus.machines[address]

    def server(self) -> Process | None:
        """Who listens at the address now."""
        return self.bus.endpoints.get(self.address)

    def on_peer_death(self, process: Process) -> None:
        """One of the two ends has died, and the other hears of it."""

    def on_power_loss(self, process: Process) -> None:
        """One of the two ends has died together with its machine, which closes no connection."""
        self.bus.open_calls.pop(self, None)


class UnaryCall(Call):
    """A call with one answer. `future` is what the caller awaits."""

    def begin(self, request: Any, timeout: float | None) -> asyncio.Future[Any]:
        self.request = self.serializer(request)
        loop = self.process.loop
        self.future: asyncio.Future[Any] = loop.create_future()
        if self.bus.is_over:
            self.future.set_exception(GONE.error())
            return self.future
        self.timer = None if timeout is None else loop.call_later(timeout, self._take, EXPIRED)
        bus = self.bus
        if any(rule("request", self) for rule in bus.rules):
            return self.future
        sender, source = self.process, self.process.machine
        if bus.send(sender, source, self.target, self._arrive, False):
            later = bus.repeats()
            if later is not None:
                bus.kernel.after(later, self._arrive, True)
        return self.future

    def _arrive(self, is_repeated: bool) -> None:
        server = self.server()
        if server is None:
            if not is_repeated:
                self.bus.send(self.process, self.target, self.process.machine, self._deliver, GONE)
            return
        server.deliver(self._serve, server, is_repeated)

    def _serve(self, server: Process, is_repeated: bool) -> None:
        kernel = self.bus.kernel
        kernel.note(self.method, zlib.crc32(self.request).to_bytes(4, "little"))
        handler = server.handlers[self.method]
        request = handler.request_deserializer(self.request)
        context = Context()
        answering = self._answer(server, handler, request, context, is_repeated)
        if self.method in _AWAITING:
            if not is_repeated:
                self.bus.open_calls[self] = server
            server.loop.create_task(answering)
            return
        try:
            answering.send(None)
        except StopIteration:
            return
        raise AssertionError(f"{self.method} waits for something")

    async def _answer(self, server: Process, handler: Any, request: Any, context: Context, is_repeated: bool) -> None:
        server.world.laws.before_call(server, self.method)
        response = await handler.unary_unary(request, context)
        server.world.laws.after_call(server, self.method, request, response, context.failure, self.process)
        self.bus.open_calls.pop(self, None)
        if is_repeated:
            return
        answer = context.failure if context.failure is not None else handler.response_serializer(response)
        if any(rule("reply", self) for rule in self.bus.rules):
            return
        self.bus.send(server, self.target, self.process.machine, self._deliver, answer)

    def _deliver(self, answer: Failure | bytes) -> None:
        self.process.deliver(self._take, answer)

    def _take(self, answer: Failure | bytes) -> None:
        if self.future.done():
            return
        if self.timer is not None:
            self.timer.cancel()
        if isinstance(answer, Failure):
            self.bus.kernel.note(f"{self.process.name} {self.method} {answer.code.name}")
            self.future.set_exception(answer.error())
        else:
            self.bus.kernel.note(f"{self.process.name} {self.method}", zlib.crc32(answer).to_bytes(4, "little"))
            self.future.set_result(self.deserializer(answer))

    def on_peer_death(self, process: Process) -> None:
        self.bus.open_calls.pop(self, None)
        if process is not self.process:
            self.bus.send(process, self.target, self.process.machine, self._deliver, GONE)


def reason_in(failure: Failure) -> str:
    """`ErrorInfo.reason` of what a server of ours answered."""
    return reason_of(status_pb2.Status.FromString(failure.trailing)) if failure.trailing else ""
