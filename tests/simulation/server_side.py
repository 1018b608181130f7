"""A stream as the process that answers it has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from tests.simulation.process import Process


class ServerSide:
    """A call as one process serves it. `is_repeated`: its answers are dropped."""

    def __init__(self, server: Process, is_repeated: bool) -> None:
        self.server = server
        self.is_repeated = is_repeated
        self.task: asyncio.Task[None]
        self.taken: list[bytes] = []
        """The requests that the servicer has read, each as soon as it asks for the next: then it has begun this one."""
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_closed = False
        self._is_answered = False

    def put(self, request: bytes | None) -> None:
        """A message of the caller has come; None: it has closed its side."""
        if not self._is_closed:
            self._is_closed = request is None
            self._requests.put_nowait(request)

    async def requests(self, deserializer: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """The caller's messages as they come, until it closes its side.

        As in grpc.aio the iterator also ends when the call is cancelled, which only the servicer's method sees. Once the answer has
        ended it raises UsageError.
        """
        while (request := await self._requests.get()) is not None:
            yield deserializer(request)
            self.taken.append(request)
        if self._is_answered:
            raise grpc.aio.UsageError("RPC already finished.")

    def end_requests(self) -> None:
        """Nothing follows; what is unread is lost."""
        while not self._requests.empty():
            self._requests.get_nowait()
        self._is_closed = True
        self._requests.put_nowait(None)

    def finish(self) -> None:
        self._is_answered = True
        self.end_requests()

    def cancel(self) -> None:
        self.task.cancel()
