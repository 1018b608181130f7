"""The client's side of the cache manager: calls that are harmless to repeat, repeated while the manager restarts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvpool.process.address import manager_addresses
from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, cache_pb2_grpc, worker_pb2

from .channels import Channels
from .config import ClientConfig
from .deadline import Deadline
from .errors import DeadlineExceeded, InvalidRequest, KvpoolError, Unavailable, Unimplemented, from_rpc_error
from .prompt import RoutedPrompt
from .request import require_fits

_BACKOFF_SECONDS_MIN: Final = 0.05
_BACKOFF_SECONDS_MAX: Final = 1.0
_ATTEMPTS_MIN: Final = 3
"""Attempts before a manager that never answered counts as absent, however late it is: this process may have been suspended."""
_ATTEMPT_SECONDS_MIN: Final = 0.5
"""Time for an attempt after the time for the first contact is over."""

_WORKER_SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
ManagerMethod: TypeAlias = Callable[
    [cache_pb2_grpc.CacheServiceStub], grpc.aio.UnaryUnaryMultiCallable[_Request, _Response]
]
"""Picks a method of the manager's stub."""


class Manager:
    """Calls the methods for clients. All of them are idempotent, so they are repeated."""

    def __init__(self, channels: Channels, config: ClientConfig) -> None:
        self._channels = channels
        self._config = config
        self._has_answered = False
        self._looking: asyncio.Task[cache_pb2.DescribeResponse] | None = None
        self._seen: cache_pb2.DescribeResponse | None = None
        self._seen_at = 0.0

    async def look(self, seconds: float, max_age: float) -> cache_pb2.DescribeResponse:
        """Return the live workers of at most `max_age` seconds ago. Callers at the same time share one call. Raises KvpoolError if
        the manager does not answer within `seconds`."""
        clock = time.monotonic
        if self._seen is not None and clock() - self._seen_at <= max_age:
            return self._seen
        if self._looking is None:
            self._looking = asyncio.create_task(self.describe(Deadline(seconds)))
            self._looking.add_done_callback(self._looked)
        # A caller that gives up must not cancel the call for the others.
        return await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[cache_pb2.DescribeResponse]) -> None:
        self._looking = None
        if not task.cancelled() and task.exception() is None:
            self._seen, self._seen_at = task.result(), time.monotonic()

    async def describe(
        self, deadline: Deadline, request: cache_pb2.DescribeRequest | None = None
    ) -> cache_pb2.DescribeResponse:
        """List live workers and their block counts, or what else the request asks for."""
        return await self.call(lambda stub: stub.Describe, request or cache_pb2.DescribeRequest(), deadline)

    async def route(
        self,
        deadline: Deadline,
        prompt: RoutedPrompt,
        *,
        max_workers: int = 0,
        num_needed_tokens: int = 0,
        explain: bool = False,
    ) -> cache_pb2.RouteResponse:
        """Rank the workers that have room for a text of `num_needed_tokens`, best first. `explain` asks also why no more of the
        prompt is cached. Advisory."""
        request = cache_pb2.RouteRequest(
            root=prompt.root,
            tokens=pack_tokens(prompt.token_ids),
            max_workers=max_workers,
            explain=explain,
            num_needed_tokens=num_needed_tokens,
            num_encoder_tokens=prompt.num_encoder_tokens,
        )
        return await self.call(lambda stub: stub.Route, request, deadline)

    async def call(
        self,
        method: ManagerMethod[_Request, _Response],
        request: _Request,
        deadline: Deadline,
    ) -> _Response:
        """Make one call of an idempotent method, and repeat it while the manager is away: until the deadline if it ever answered,
        else for first_contact. InvalidRequest if no message can hold the request."""
        require_fits(request)
        contact = Deadline(self._config.first_contact, deadline.clock)
        backoff = _BACKOFF_SECONDS_MIN
        num_attempts = 0
        while True:
            num_attempts += 1
            deadline.check(f"asking the manager at {self._config.manager}")
            patience = deadline if self._has_answered else contact
            try:
                longest = max(patience.remaining(), _ATTEMPT_SECONDS_MIN)
                timeout = min(self._config.unary_timeout, deadline.remaining(), longest)
                response = await method(self._channels.manager(self._config.manager))(request, timeout=timeout)
            except grpc.aio.AioRpcError as rpc_error:
                error = from_rpc_error(rpc_error, f"the manager at {self._config.manager}")
                if isinstance(error, Unimplemented) and not error.reason and await self._is_worker():
                    raise InvalidRequest(
                        f"{self._config.manager} is the port of a worker, not of the manager: `kvpool up` and the manager's log "
                        "name the manager's; give it with --manager or KVPOOL_MANAGER",
                        reason="NO_MANAGER",
                    ) from rpc_error
                if not isinstance(error, Unavailable | DeadlineExceeded):
                    raise error from rpc_error
                left = deadline.remaining()
                if num_attempts >= _ATTEMPTS_MIN:
                    left = min(left, patience.remaining())
                if left <= 0:
                    # A request that was given little time says nothing of the manager.
                    if isinstance(error, DeadlineExceeded):
                        deadline.check(f"asking the manager at {self._config.manager}")
                    raise await self._unreachable(error) from rpc_error
                pause = max(backoff * random.uniform(0.8, 1.2), error.retry_after or 0.0)
                await asyncio.sleep(min(pause, left))
                backoff = min(2 * backoff, _BACKOFF_SECONDS_MAX)
            else:
                self._has_answered = True
                return response

    async def _is_worker(self) -> bool:
        """Whether the address is a worker's: its health service then knows WorkerService, serving or not."""
        request = health_pb2.HealthCheckRequest(service=_WORKER_SERVICE)
        try:
            first = manager_addresses(self._config.manager)[0]
            await self._channels.health(first).Check(request, timeout=_ATTEMPT_SECONDS_MIN)
        except (IndexError, grpc.aio.AioRpcError):
            return False
        return True

    async def _unreachable(self, error: KvpoolError) -> KvpoolError:
        if error.reason:
            return error
        for address in manager_addresses(self._config.manager):
            host = address.rpartition(":")[0]
            try:
                await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None)
            except OSError as unknown:
                return Unavailable(
                    f"the host name {host!r} of the manager does not resolve ({unknown.strerror}); name the manager with --manager "
                    "or KVPOOL_MANAGER",
                    reason="NO_MANAGER",
                )
        return Unavailable(
            f"no manager answers at {self._config.manager}; start a cluster with `kvpool up`, "
            "or name another manager with --manager or KVPOOL_MANAGER",
            reason="NO_MANAGER",
        )
