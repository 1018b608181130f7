"""The request of one attempt: its responses, how it ended, and whether a silent worker still lives."""

from __future__ import annotations

import asyncio

import grpc.aio

from kvpool.v1 import worker_pb2

from .answer_streams import Answers, EndedEarly
from .deadline import Deadline
from .errors import Cancelled, KvpoolError, ProtocolError, Unavailable, from_rpc_error, from_status
from .failover import Target
from .manager import Manager


class WatchedCall:
    """One request to a worker, and a check that the worker lives. A frozen worker looks like a busy one, and a machine without
    power closes no connection. So after `liveness_interval` seconds without a message the manager is asked."""

    def __init__(
        self, answers: Answers, target: Target, *, manager: Manager, liveness_interval: float, deadline: Deadline
    ) -> None:
        self._answers = answers
        self.target = target
        self._who = f"{target.worker_id} ({target.address})"
        self._manager = manager
        self._liveness_interval = liveness_interval
        self._deadline = deadline
        self._num_delivered = 0
        self._incarnation: int | None = None
        """Incarnation of the worker when the manager was first asked; None: not asked yet."""
        self._watch: asyncio.Task[None] | None = None
        self._waiting_since: float | None = None
        """Loop time at which the pending read began; None: no read is pending."""
        self._timer = asyncio.get_running_loop().call_later(deadline.remaining(), self._expire)

    def __repr__(self) -> str:
        return f"WatchedCall({self.target})"

    def cancel(self) -> None:
        """End the request; the worker frees its blocks. May be repeated."""
        self._end(Cancelled(f"{self._who}: the stream was closed before its end", reason="CANCELLED"))
        if self._watch is not None:
            self._watch.cancel()

    def _end(self, why: KvpoolError) -> None:
        self._timer.cancel()
        self._answers.cancel(why)

    def _give_up(self, why: str) -> None:
        """End the request because the worker is lost."""
        self._timer.cancel()
        self._answers.abandon(Unavailable(f"{self._who}: does not answer, and {why}", reason="LEASE_ENDED"))

    def _expire(self) -> None:
        self._end(self._deadline.exceeded(f"{self._who} was answering, {self._num_delivered} tokens were there"))

    async def read(self, num_delivered: int) -> worker_pb2.GenerateResponse:
        """Wait for the next response. Raises KvpoolError if the request has ended. `num_delivered`: tokens so far, for that
        message."""
        self._num_delivered = num_delivered
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_worker())
        self._waiting_since = asyncio.get_running_loop().time()
        try:
            return await self._answers.read()
        except EndedEarly as ended:
            if isinstance(ended.ending, grpc.aio.AioRpcError):
                raise from_rpc_error(ended.ending, self._who) from ended.ending
            if ended.ending is not None:
                raise from_status(ended.ending, self._who) from None
            raise ProtocolError(f"{self._who} ended its stream without a finish reason", reason="INCOMPLETE") from None
        finally:
            self._waiting_since = None

    async def _watch_worker(self) -> None:
        """Ask the manager whenever a read has waited for the interval. If the worker is lost, end the request, and with it the
        read. One task serves the whole request: a task and a timer for each message would cost more than the message."""
        clock = asyncio.get_running_loop().time
        num_missing = 0
        while True:
            since = self._waiting_since
            silent_seconds = 0.0 if since is None else clock() - since
            if silent_seconds < self._liveness_interval:
                num_missing = 0
                await asyncio.sleep(self._liveness_interval - silent_seconds)
                continue
            incarnations = await self._look()
            # The answer may have come while we asked.
            if self._waiting_since != since:
                continue
            # Missing once may be a manager that has just restarted and waits for registrations.
            num_missing = num_missing + 1 if incarnations == [] else 0
            if incarnations and incarnations[0] != self._incarnation:
                self._give_up("another process serves under its name by now")
                return
            if num_missing == 2:
                self._give_up("its lease has ended")
                return
            await asyncio.sleep(self._liveness_interval)

    async def _look(self) -> list[int] | None:
        """Ask the manager for the incarnation of the live worker of this name and address, if there is one. None: the manager does
        not answer."""
        seconds = min(self._liveness_interval, max(self._deadline.remaining(), 0.001))
        try:
            response = await self._manager.look(seconds, self._liveness_interval / 2)
        except KvpoolError:
            return None
        ours = (self.target.worker_id, self.target.address)
        found = [worker.incarnation for worker in response.workers if (worker.worker_id, worker.address) == ours]
        if found and self._incarnation is None:
            self._incarnation = found[0]
        return found
