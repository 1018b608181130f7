"""One attempt's call: its messages, what became of it, and whether a worker that says nothing still lives."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

import grpc.aio

from kvpool.v1 import worker_pb2

from .deadline import Deadline
from .errors import Cancelled, DeadlineExceeded, KvpoolError, ProtocolError, Unavailable, from_rpc_error
from .failover import Target
from .manager import Manager

Call = grpc.aio.UnaryStreamCall[worker_pb2.GenerateRequest, worker_pb2.GenerateResponse]


class _Sight(Enum):
    """What the manager says of the worker."""

    LIVE = auto()
    MISSING = auto()
    REPLACED = auto()
    """Another process serves under its name and address."""


class WatchedCall:
    """A frozen worker looks like a busy one, and a machine that lost its power closes no connection: when nothing has come for
    `liveness_interval` seconds the manager is asked, which knows the difference."""

    def __init__(
        self, call: Call, target: Target, *, manager: Manager, liveness_interval: float, deadline: Deadline
    ) -> None:
        self._call = call
        self.target = target
        self._who = f"{target.worker_id} ({target.address})"
        self._manager = manager
        self._liveness_interval = liveness_interval
        self._deadline = deadline
        self._incarnation: int | None = None
        """The worker's, as the manager first named it."""

    def __repr__(self) -> str:
        return f"WatchedCall({self.target})"

    def cancel(self) -> None:
        """End the call; the worker frees its blocks. May be repeated."""
        self._call.cancel()

    async def read(self, num_delivered: int) -> worker_pb2.GenerateResponse:
        """The next message, or what became of the call as a KvpoolError. `num_delivered`: tokens so far, for the message."""
        try:
            message = await self._read()
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc_error(rpc_error, self._who)
            if isinstance(error, DeadlineExceeded) and not error.reason:
                error = self._deadline.exceeded(f"{self._who} was answering, {num_delivered} tokens were there")
            raise error from rpc_error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # grpc.aio raises this also for a status CANCELLED, sent by the server or made by our own cancel().
            raise Cancelled(f"{self._who}: the stream was closed before its end", reason="CANCELLED") from None
        if isinstance(message, worker_pb2.GenerateResponse):
            return message
        raise ProtocolError(f"{self._who} ended its stream without a finish reason", reason="INCOMPLETE")

    async def _read(self) -> object:
        read = asyncio.ensure_future(self._call.read())
        num_missing = 0
        try:
            while True:
                done, _ = await asyncio.wait({read}, timeout=self._liveness_interval)
                if done:
                    return read.result()
                sight = await self._look()
                # Missing once may be a manager that has just restarted and waits for registrations.
                num_missing = num_missing + 1 if sight is _Sight.MISSING else 0
                # The answer may have come while we asked.
                if read.done():
                    continue
                if sight is _Sight.REPLACED:
                    raise self._lost("another process serves under its name by now")
                if num_missing == 2:
                    raise self._lost("its lease has ended")
        finally:
            read.cancel()

    def _lost(self, why: str) -> Unavailable:
        return Unavailable(f"{self._who}: does not answer, and {why}", reason="LEASE_ENDED")

    async def _look(self) -> _Sight:
        """Ask the manager; also LIVE if the manager itself cannot say."""
        seconds = min(self._liveness_interval, max(self._deadline.remaining(), 0.001))
        try:
            response = await self._manager.look(seconds, self._liveness_interval / 2)
        except KvpoolError:
            return _Sight.LIVE
        for worker in response.workers:
            if (worker.worker_id, worker.address) == (self.target.worker_id, self.target.address):
                if self._incarnation is None:
                    self._incarnation = worker.incarnation
                return _Sight.LIVE if worker.incarnation == self._incarnation else _Sight.REPLACED
        return _Sight.MISSING
