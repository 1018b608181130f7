"""Calls over the bus, for the real stubs and the real servicers: bytes go in and bytes come out."""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import status_pb2

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.kernel import Kernel
    from tests.simulation.process import Process

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS = "grpc-status-details-bin"
_AWAITING = frozenset({"Register", "Check"})
"""Methods of the manager that may wait for something."""


class Failure:
    """What a server answers instead of a response."""

    __slots__ = ("code", "details", "trailing")

    def __init__(self, code: grpc.StatusCode, details: str, trailing: bytes | None = None) -> None:
        self.code = code
        self.details = details
        self.trailing = trailing

    def error(self) -> grpc.aio.AioRpcError:
        """As the caller sees it."""
        metadata = grpc.aio.Metadata()
        if self.trailing is not None:
            metadata.add(_DETAILS, self.trailing)
        return grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), metadata, details=self.details)


GONE = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused or reset")
EXPIRED = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


class Context:
    """What a servicer sees of its call."""

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._code: Any = None
        self._details = ""
        self._on_done: list[Callable[[Any], None]] = []

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
        """The call has ended, one way or another."""
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
        request: bytes,
        deserializer: Callable[[bytes], Any],
    ) -> None:
        self.bus = bus
        self.process = process
        self.address = address
        self.method = method
        self.request = request
        self.deserializer = deserializer
        self.target = bus.machines[address]

    def server(self) -> Process | None:
        """Who listens at the address now."""
        return self.bus.endpoints.get(self.address)

    def on_peer_death(self, process: Process) -> None:
        """One of the two ends has died, and the other hears of it."""


class UnaryCall(Call):
    """A call with one answer. `future` is what the caller awaits."""

    def begin(self, timeout: float | None) -> asyncio.Future[Any]:
        """Send the request."""
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


class StreamCall(Call):
    """A call with a stream of answers, over a connection that keeps their order."""

    last_arrival = 0.0
    is_broken = False
    """The connection has broken: nothing more comes through."""

    def begin(self, timeout: float | None) -> StreamCall:
        """Send the request."""
        self._messages: deque[bytes] = deque()
        self._end: Failure | None = None
        self._is_ended = False
        self._is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._serving: list[tuple[Process, asyncio.Task[None]]] = []
        self._timer = None if timeout is None else self.process.loop.call_later(timeout, self._expire)
        bus = self.bus
        if bus.is_over:
            self._finish(GONE)
            return self
        bus.open_calls[self] = None
        sender, source = self.process, self.process.machine
        bus.send_in_order(self, sender, source, self.target, self._arrive, False)
        return self

    # -- the caller's side

    async def read(self) -> Any:
        """The next message; EOF at the end. Raises AioRpcError, CancelledError."""
        while True:
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._messages:
                return self.deserializer(self._messages.popleft())
            if self._is_ended:
                if self._end is None:
                    return grpc.aio.EOF
                raise self._end.error()
            self._waiter = self.process.loop.create_future()
            await self._waiter

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    def cancel(self) -> bool:
        """End the call; its server hears of it."""
        if self._is_ended or self._is_cancelled:
            return False
        self._is_cancelled = True
        self._close()
        return True

    def _expire(self) -> None:
        if not self._is_ended and not self._is_cancelled:
            self._finish(EXPIRED)
            self._close()

    def _close(self) -> None:
        self._wake()
        if self._timer is not None:
            self._timer.cancel()
        self.bus.open_calls.pop(self, None)
        if not self.bus.is_over:
            self.bus.send_in_order(self, self.process, self.process.machine, self.target, self._stop_serving)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _finish(self, end: Failure | None) -> None:
        if self._is_ended or self._is_cancelled:
            return
        self._is_ended, self._end = True, end
        if self._timer is not None:
            self._timer.cancel()
        self.bus.open_calls.pop(self, None)
        self._wake()

    def _take(self, message: bytes) -> None:
        self.bus.kernel.note(f"{self.process.name} {self.method}", zlib.crc32(message).to_bytes(4, "little"))
        if not self._is_ended and not self._is_cancelled:
            self._messages.append(message)
            self._wake()

    # -- the server's side

    def _arrive(self, is_repeated: bool) -> None:
        server = self.server()
        if server is None:
            if not is_repeated:
                self._say(self.process, self._finish, GONE)
            return
        server.deliver(self._serve, server, is_repeated)

    def _serve(self, server: Process, is_repeated: bool) -> None:
        if not is_repeated:
            self.bus.open_calls[self] = server
            # A second one in front of the first would be the one that is answered: no transport does that to a stream.
            later = self.bus.repeats()
            if later is not None:
                self.bus.kernel.after(10 * later, self._arrive, True)
        task = server.loop.create_task(self._answer(server, is_repeated))
        if not is_repeated:
            self._serving.append((server, task))

    async def _answer(self, server: Process, is_repeated: bool) -> None:
        handler = server.handlers[self.method]
        context = Context()
        server.world.on_stream(server, self, is_repeated)
        try:
            async for response in handler.unary_stream(handler.request_deserializer(self.request), context):
                if not is_repeated:
                    self._say(server, self._take, handler.response_serializer(response))
            if not is_repeated:
                self._say(server, self._finish, context.failure)
        finally:
            context.done()

    def _say(self, sender: Process, take: Callable[..., None], what: Any) -> None:
        if not self.bus.is_over:
            machine = self.process.machine
            self.bus.send_in_order(self, sender, self.target, machine, self.process.deliver, take, what)

    def _stop_serving(self) -> None:
        server = self.server()
        if server is not None:
            server.deliver(self._cancel_serving, server)

    def _cancel_serving(self, server: Process) -> None:
        for at, task in self._serving:
            if at is server:
                task.cancel()

    def break_off(self, kernel: Kernel) -> None:
        """The connection breaks: both sides hear of it."""
        self.is_broken = True
        kernel.after(0.1, self.process.deliver, self._finish, GONE)
        kernel.after(0.1, self._stop_serving)

    def on_peer_death(self, process: Process) -> None:
        self.bus.open_calls.pop(self, None)
        if process is self.process:
            self.bus.send_in_order(self, process, process.machine, self.target, self._stop_serving)
        else:
            self._say(process, self._finish, GONE)


class _Method:
    def __init__(self, bus: Bus, process: Process, address: str, kind: type[Any], path: str, options: Any) -> None:
        self._bus, self._process, self._address, self._kind = bus, process, address, kind
        self._name = path.rpartition("/")[2]
        self._serialize = options["request_serializer"]
        self._deserialize = options["response_deserializer"]

    def __call__(self, request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
        # A connection is there at once or not at all; whoever would wait for one asks again.
        self._process.on_call(self._name)
        call = self._kind(
            self._bus, self._process, self._address, self._name, self._serialize(request), self._deserialize
        )
        return call.begin(timeout)


class Channel:
    """What a generated stub takes for a channel."""

    def __init__(self, bus: Bus, process: Process, address: str) -> None:
        self._bus, self._process, self._address = bus, process, address
        self._methods: dict[str, _Method] = {}

    def unary_unary(self, path: str, **options: Any) -> _Method:
        """Of the generated code."""
        return self._methods.get(path) or self._method(UnaryCall, path, options)

    def unary_stream(self, path: str, **options: Any) -> _Method:
        """Of the generated code."""
        return self._methods.get(path) or self._method(StreamCall, path, options)

    def _method(self, kind: type[Any], path: str, options: Any) -> _Method:
        method = self._methods[path] = _Method(self._bus, self._process, self._address, kind, path, options)
        return method


def reason_in(failure: Failure) -> str:
    """`ErrorInfo.reason` of what a server of ours answered."""
    from kvpool.protocol.status import reason_of

    return reason_of(status_pb2.Status.FromString(failure.trailing)) if failure.trailing else ""
