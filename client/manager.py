"""The client's side of the cache manager: calls that are harmless to repeat, repeated while the manager restarts."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Final, TypeVar

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from kvpool.process.address import manager_addresses
from kvpool.protocol.limits import MAX_MESSAGE_BYTES
from kvpool.protocol.tokens import pack_tokens
from kvpool.v1 import cache_pb2, worker_pb2

from .channels import Channels
from .config import ClientConfig
from .deadline import Deadline
from .errors import DeadlineExceeded, InvalidRequest, KvpoolError, Unavailable, Unimplemented, from_rpc_error
from .routed_prompt import RoutedPrompt

MAX_GRACE_SECONDS: Final = 3600
_BACKOFF_SECONDS_MIN: Final = 0.05
_BACKOFF_SECONDS_MAX: Final = 1.0
_ATTEMPTS_MIN: Final = 3
"""Attempts before a manager that never answered counts as absent, however late it is: this process may have been suspended."""
_ATTEMPT_SECONDS_MIN: Final = 0.5
"""Time for an attempt after the time for the first contact is over."""

_WORKER_SERVICE: Final[str] = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class Manager:
    """Calls DescribeBlock, Describe, Explain, Check, Route and Drain. All of them are idempotent, so they are repeated."""

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
        self,
        deadline: Deadline,
        *,
        worker_id: str = "",
        first_block: int | None = None,
        max_blocks: int = 0,
        group: int = 0,
        max_sequences: int = 0,
    ) -> cache_pb2.DescribeResponse:
        """List live workers and their block counts. With first_block also one page of the block map of that worker's group; with
        max_sequences also at most that many live sequences of each worker, oldest first."""
        request = cache_pb2.DescribeRequest(
            worker_id=worker_id,
            include_blocks=first_block is not None,
            first_block=first_block or 0,
            max_blocks=max_blocks,
            group=group,
            max_sequences=max_sequences,
        )
        return await self._call(self._channels.manager(self._config.manager).Describe, request, deadline)

    async def describe_block(
        self, deadline: Deadline, worker_id: str, block_id: int, group: int = 0
    ) -> cache_pb2.DescribeBlockResponse:
        """Describe one block of a worker's group."""
        if not 0 <= block_id < 2**32:
            raise InvalidRequest(f"a block id must be in 0 … 2**32 − 1, got {block_id}", reason="BAD_FIELD")
        request = cache_pb2.DescribeBlockRequest(worker_id=worker_id, block_id=block_id, group=group)
        return await self._call(self._channels.manager(self._config.manager).DescribeBlock, request, deadline)

    async def check(self, deadline: Deadline) -> cache_pb2.CheckResponse:
        """Audit the manager's laws."""
        return await self._call(self._channels.manager(self._config.manager).Check, cache_pb2.CheckRequest(), deadline)

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
        _require_fit(request, len(prompt.token_ids))
        return await self._call(self._channels.manager(self._config.manager).Route, request, deadline)

    async def explain(
        self, deadline: Deadline, prompt: RoutedPrompt, *, worker_id: str = ""
    ) -> cache_pb2.ExplainResponse:
        """Explain what each worker, or the one named, would serve of a prompt, and why no more."""
        tokens = pack_tokens(prompt.token_ids)
        request = cache_pb2.ExplainRequest(root=prompt.root, tokens=tokens, worker_id=worker_id)
        _require_fit(request, len(prompt.token_ids))
        return await self._call(self._channels.manager(self._config.manager).Explain, request, deadline)

    async def drain(self, deadline: Deadline, worker_id: str, grace: float | None) -> cache_pb2.DrainResponse:
        """Ask a worker to end its requests within `grace` seconds, and leave."""
        if grace is not None and not 0 <= grace <= MAX_GRACE_SECONDS:
            raise InvalidRequest(
                f"the grace of a drain must be 0 to {MAX_GRACE_SECONDS} seconds, got {grace:g}", reason="BAD_FIELD"
            )
        grace_ms = None if grace is None else round(grace * 1000)
        request = cache_pb2.DrainRequest(worker_id=worker_id, grace_ms=grace_ms)
        return await self._call(self._channels.manager(self._config.manager).Drain, request, deadline)

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        deadline: Deadline,
    ) -> _Response:
        """Make one call, and repeat it while the manager is away: until the deadline if it ever answered, else for
        first_contact."""
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
                response = await method(request, timeout=timeout)
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


def _require_fit(request: Message, num_tokens: int) -> None:
    if request.ByteSize() > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"a prompt of {num_tokens} tokens does not fit a message of {MAX_MESSAGE_BYTES} bytes", reason="NEVER_FITS"
        )
