"""What a generated stub takes for a channel: to one address, or to the manager that leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import grpc

from kvpool.process.manager_channel import is_of_no_leader
from tests.simulation.rpc import UnaryCall
from tests.simulation.stream_call import DuplexCall, StreamCall

if TYPE_CHECKING:
    from tests.simulation.bus import Bus
    from tests.simulation.process import Process


class Leaders:
    """Which managers a process believes to lead: what their health said last, and how calls have ended."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._believed = dict.fromkeys(addresses, True)
        self._turn = 0

    def next(self) -> str:
        """In turns. Where none is known to lead, one of all."""
        believed = [address for address, leads in self._believed.items() if leads] or list(self._believed)
        self._turn += 1
        return believed[self._turn % len(believed)]

    def on_health(self, address: str, leads: bool) -> None:
        self._believed[address] = leads

    def on_done(self, address: str, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()
        self._believed[address] = not (isinstance(error, grpc.aio.AioRpcError) and is_of_no_leader(error))


class Channel:
    def __init__(self, bus: Bus, process: Process, address: str) -> None:
        self._bus, self._process, self._address = bus, process, address

    def _method(self, kind: type[Any], path: str, **options: Any) -> Callable[..., Any]:
        """A method as the generated code gets it. It takes a message, or an async iterator of messages."""

        def begin(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            # A connection is there at once or not at all; a caller that would wait for one asks again.
            name = path.rpartition("/")[2]
            self._process.on_call(name)
            codecs = options["request_serializer"], options["response_deserializer"]
            return kind(self._bus, self._process, self._address, name, *codecs).begin(request, timeout)

        return begin

    unary_unary = partialmethod(_method, UnaryCall)
    unary_stream = partialmethod(_method, StreamCall)
    stream_stream = partialmethod(_method, DuplexCall)


class LeaderChannel:
    """From one process to the managers at several addresses, as common/kvpool/process/manager_channel.py: a call with one answer
    goes, in turns, to one of those that are believed to lead."""

    def __init__(self, bus: Bus, process: Process, addresses: tuple[str, ...]) -> None:
        self._channels = {address: Channel(bus, process, address) for address in addresses}
        self._leaders = process.leaders

    def unary_unary(self, path: str, **options: Any) -> Callable[..., Any]:
        """A method as the generated code gets it."""
        methods = {address: channel.unary_unary(path, **options) for address, channel in self._channels.items()}

        def begin(request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            address = self._leaders.next()
            answer = methods[address](request, timeout)
            answer.add_done_callback(lambda done: self._leaders.on_done(address, done))
            return answer

        return begin

    def unary_stream(self, path: str, **options: Any) -> Any:
        """A method of the first one, as the generated code gets it."""
        return next(iter(self._channels.values())).unary_stream(path, **options)
