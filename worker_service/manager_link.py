"""Talking to the manager: registration, heartbeats, and sending what the cache side wants said. Runs beside the engine's steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import grpc
import structlog
from kvpool.process.server_settings import MAX_MESSAGE_BYTES
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from .cache.link import Call
from .engine.engine import Engine
from .status import reason_of_failure

log = structlog.get_logger("kvpool.link")

CALL_SECONDS = 2.0
"""Deadline of every call; a call that is given up goes out again with the state of then."""
REGISTER_RETRY_SECONDS = 0.2
REGISTER_PAUSE_SECONDS = 0.02
"""Between the end of a session and the next: should sessions end as soon as they begin, this is what is left of the CPU."""
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
"""A registration that is answered so would be answered so again. Anything else may pass: a manager that starts or stops."""
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The default grows to two minutes; a restarted manager must be found again at once: streams live on their reserve meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time-out of one attempt to connect, whatever its name says.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Never by way of a proxy that the environment names for the web: it knows no local addresses.
    ("grpc.enable_http_proxy", 0),
    # A mutating call must never be sent twice under one number without our knowing.
    ("grpc.enable_retries", 0),
]


class RegistrationRefused(Exception):
    """The manager will not have this worker, and asking again would not help."""


class ManagerLink:
    """Keeps one worker registered and the manager informed. `on_session(open)` is called whenever that changes."""

    def __init__(
        self,
        address: str,
        introduction: cache_pb2.RegisterRequest,
        engine: Engine,
        on_session: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._introduction = introduction
        self._engine = engine
        self._cache = engine.cache
        self._on_session = on_session
        self._clock = clock
        self._register_no = 0
        self.highest_epoch = 0
        """Of the manager, that this process has seen."""
        self.num_sessions = 0
        """Registrations that the manager has taken."""
        self.num_failed_calls = 0
        """Mutating calls that were not executed or not answered."""
        self._session = 0
        self._keep_alive_seconds = 1.0
        self._keep_alive_deadline = CALL_SECONDS
        self._complained = False
        self._is_away = False
        """Nobody answered the last call: the next one waits for a connection, and is on its way as soon as somebody listens."""
        self._heartbeat_due = asyncio.Event()
        self._is_announced = False

    def send_heartbeat(self) -> None:
        """Send the next heartbeat at once: there is something in it that the manager should know."""
        self._heartbeat_due.set()

    async def run(self) -> None:
        """Connect and `talk_to` the manager; for ever. Raises RegistrationRefused."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            await self.talk_to(cache_pb2_grpc.CacheServiceStub(channel))

    async def talk_to(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Register, talk, and register again when the session is lost; for ever. Raises RegistrationRefused."""
        try:
            while True:
                await self._register(stub)
                await self._hold_session(stub)
                self._is_announced = False
                self._on_session(False)
                await self._until_reset()
                await asyncio.sleep(REGISTER_PAUSE_SECONDS)
        finally:
            await self._deregister(stub)

    # -- sessions

    async def _hold_session(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Calls and heartbeats until the session is lost. If either breaks, so does the whole: no half-dead worker."""
        tasks = [asyncio.create_task(self._talk(stub)), asyncio.create_task(self._keep_alive(stub))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _register(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        while True:
            self._register_no += 1
            request = cache_pb2.RegisterRequest()
            request.CopyFrom(self._introduction)
            request.register_no = self._register_no
            request.highest_epoch_seen = self.highest_epoch
            request.last_session = self._session
            request.holds_state = self._cache.holds_state
            try:
                response = await stub.Register(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
            except grpc.aio.AioRpcError as error:
                self._on_register_failed(error)
                await asyncio.sleep(REGISTER_RETRY_SECONDS)
                continue
            self._complained = self._is_away = False
            self.highest_epoch = max(self.highest_epoch, response.epoch)
            self.num_sessions += 1
            self._keep_alive_seconds = response.keep_alive_interval_ms / 1000
            # One that is lost must leave time for the next, also under a short lease.
            self._keep_alive_deadline = min(CALL_SECONDS, response.lease_ms / 4000)
            self._session = response.session
            self._cache.on_registered(response)
            log.info(
                "registered",
                manager=self._address,
                epoch=response.epoch,
                session=f"{response.session:#x}",
                report=request.holds_state,
            )
            self._announce_if_ready()
            self._engine.on_cache_changed()
            if self._engine.is_draining:
                self.send_heartbeat()  # the new session does not know it yet
            return

    def _on_register_failed(self, error: grpc.aio.AioRpcError) -> None:
        self._is_away = _is_of_nobody(error)
        reason = reason_of_failure(error)
        code = error.code()
        if code not in _FINAL and reason != "STALE_INCARNATION":
            if not self._complained:
                self._complained = True
                log.warning("waiting for the manager", manager=self._address, why=error.details() or code.name)
            return
        raise RegistrationRefused(
            f"the manager at {self._address} refused this worker: {error.details()} ({reason or code.name})"
        )

    def _announce_if_ready(self) -> None:
        """Say once in a session that the worker serves: when its report is in, if it has one."""
        if self._cache.is_ready() and not self._is_announced:
            self._is_announced = True
            self._on_session(True)

    async def _until_reset(self) -> None:
        """If all is given up: until the engine has ended its streams and steps and forgotten all blocks."""
        while self._cache.is_given_up:
            self._engine.on_cache_changed()
            self._engine.changed_for_link.clear()
            if self._cache.is_given_up:
                await self._engine.changed_for_link.wait()

    async def _deregister(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        if self._session:
            try:
                await stub.Deregister(cache_pb2.DeregisterRequest(session=self._session), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.info("left without a good-bye", why=error.details())

    async def _keep_alive(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        session = self._session
        while True:
            await _wait_at_most(self._heartbeat_due, self._keep_alive_seconds)
            self._heartbeat_due.clear()
            request = self._cache.keep_alive(self._engine.load(), draining=self._engine.is_draining)
            if request is None:
                continue
            try:
                response = await stub.KeepAlive(request, timeout=self._keep_alive_deadline)
            except grpc.aio.AioRpcError as error:
                if reason_of_failure(error) == "STALE_SESSION":
                    self._cache.lose("the manager no longer knows this session")
                    self._engine.on_cache_changed()
                    self._engine.changed_for_link.set()
                    return
                log.debug("heartbeat not answered", why=error.details())
                continue
            self._cache.on_keep_alive(session, response)
            self._engine.on_cache_changed()

    # -- calls

    async def _talk(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Send call after call until the session is lost. The engine may have reset the cache before we look."""
        engine, cache = self._engine, self._cache
        while cache.session == self._session:
            engine.changed_for_link.clear()
            now = self._clock()
            call = cache.next_call(engine.scheduler.candidates, now)
            if call is not None:
                await self._send(stub, call)
                engine.on_cache_changed()
                continue
            at = cache.next_call_at(now)
            await _wait_at_most(engine.changed_for_link, None if at is None else max(0.001, at - now))

    async def _send(self, stub: cache_pb2_grpc.CacheServiceStub, call: Call) -> None:
        request = call.request
        try:
            response: (
                cache_pb2.AllocateResponse
                | cache_pb2.AppendResponse
                | cache_pb2.FreeResponse
                | cache_pb2.ReportResponse
            )
            if isinstance(request, cache_pb2.ReportRequest):
                response = await stub.Report(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
            elif isinstance(request, cache_pb2.AllocateRequest):
                response = await stub.Allocate(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
            elif isinstance(request, cache_pb2.AppendRequest):
                response = await stub.Append(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
            else:
                response = await stub.Free(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
        except grpc.aio.AioRpcError as error:
            self._on_call_failed(call, error)
        else:
            self._is_away = False
            self._cache.on_reply(call, response, self._clock())
            self._announce_if_ready()

    def _on_call_failed(self, call: Call, error: grpc.aio.AioRpcError) -> None:
        self.num_failed_calls += 1
        self._is_away = _is_of_nobody(error)
        reason = reason_of_failure(error)
        retriable = reason in ("STALE_CALL", "STALE_SESSION") or error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        )
        log.log(20 if retriable else 40, "call not executed", why=error.details(), code=error.code().name)
        if retriable:
            self._cache.on_failure(call, reason, self._clock())
        else:
            # The same call would be refused again.
            self._cache.on_refused(call, error.details() or error.code().name)


def _is_of_nobody(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call may have failed because no manager was there; one that starts or stops answers so too."""
    code = error.code()
    return code is grpc.StatusCode.UNAVAILABLE or code is grpc.StatusCode.DEADLINE_EXCEEDED


async def _wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
