"""The API server with the Lease, behind the simulated bus: its rules are those of tests/cache_service/election/api_server.py."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx

from tests.cache_service.election.api_server import NAMESPACE, ApiServer, Body

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

MACHINE = "api"
URL = "http://api"
LEASE = "kvpool"


class LeaseServer(ApiServer):
    """Answers at once, or `delay_seconds` after it has executed a request. It never ends."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.delay_seconds = 0.0
        self.is_deleted = False
        """Somebody has deleted the Lease: the next one begins with the first epoch, while its last holder still leads."""
        self._watches: dict[_Watch, None] = {}

    def execute(self, process: Process, request: httpx.Request) -> httpx.Response:
        if request.method == "GET" and request.url.path == NAMESPACE:
            watch = _Watch(self, process, int(request.url.params["resourceVersion"]))
            self._watches[watch] = None
            for number, kind, body in self._events:
                watch.on_change(number, kind, body)
            return httpx.Response(200, stream=watch)
        return self._execute(request)

    def send(self, process: Process, deliver: Any, *arguments: Any) -> None:
        """A message to a process, which may be lost or late."""
        self.world.kernel.after(self.delay_seconds, self._send, process, deliver, *arguments)

    def _send(self, process: Process, deliver: Any, *arguments: Any) -> None:
        self.world.bus.send(process, MACHINE, process.machine, deliver, *arguments)

    def forget(self, watch: _Watch) -> None:
        self._watches.pop(watch, None)

    def _notify(self, kind: str, body: Body) -> None:
        super()._notify(kind, body)
        for watch in list(self._watches):
            watch.on_change(self.version, kind, body)


class Connection(httpx.AsyncBaseTransport):
    """From one process to the server."""

    def __init__(self, server: LeaseServer, process: Process) -> None:
        self._server = server
        self._process = process

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises ReadTimeout if no answer comes in time."""
        process, bus = self._process, self._server.world.bus
        answer: asyncio.Future[httpx.Response] = process.loop.create_future()
        bus.send(process, process.machine, MACHINE, self._arrive, request, answer)
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                return await answer
        except TimeoutError:
            raise httpx.ReadTimeout("no answer", request=request) from None

    def _arrive(self, request: httpx.Request, answer: asyncio.Future[httpx.Response]) -> None:
        found = self._server.execute(self._process, request)
        self._server.send(self._process, self._process.deliver, _take, answer, found)


def _take(answer: asyncio.Future[httpx.Response], found: httpx.Response) -> None:
    if not answer.done():
        answer.set_result(found)


class _Watch(httpx.AsyncByteStream):
    """What a watch streams: a line for each change after a version."""

    def __init__(self, server: LeaseServer, process: Process, version: int) -> None:
        self._server = server
        self._process = process
        self._version = version
        self._lines: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None

    def on_change(self, number: int, kind: str, body: Body) -> None:
        if self._process.is_dead:
            self._server.forget(self)
        elif number > self._version:
            self._version = number
            line = json.dumps({"type": kind, "object": body}).encode() + b"\n"
            self._server.send(self._process, self._process.deliver, self._take_line, line)

    def _take_line(self, line: bytes) -> None:
        self._lines.append(line)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._lines:
                yield self._lines.popleft()
            self._reader = self._process.loop.create_future()
            await self._reader

    async def aclose(self) -> None:
        self._server.forget(self)
