"""The link to the manager: registration, heartbeats, and the cache side's calls. Runs concurrently with the engine's steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from kvpool.process.call_status import details_of
from kvpool.process.manager_channel import ManagerChannel
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from .cache.link_state import SESSION_OVER, MutatingCall
from .engine.engine import Engine
from .registration import FINAL, PASSING, Patience, WorkerRegistration

log = structlog.get_logger("kvpool.link")

CALL_SECONDS = 2.0
"""Deadline of every call; a call that is given up is sent again with the state of that time."""
REGISTER_RETRY_SECONDS = 0.2
LEAVE_SECONDS = 2.0
"""Time for finding out, before leaving, whether an unanswered Register was executed."""
REGISTER_PAUSE_SECONDS = 0.02
"""Pause between the end of a session and the next: leaves some CPU if sessions end as soon as they begin."""


class RegistrationRefused(Exception):
    """The manager refuses this worker for a reason that does not pass."""


class ManagerLink:
    """Keeps one worker registered, and sends its heartbeats and calls.

    `on_session(works)` is called at each change: a session works once its report is complete, until it ends or no heartbeat is
    answered for the length of its lease.
    """

    def __init__(
        self,
        address: str,
        introduction: cache_pb2.RegisterRequest,
        engine: Engine,
        on_session: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._registration = WorkerRegistration(introduction)
        self._engine = engine
        self._cache = engine.cache
        self._on_session = on_session
        self._clock = clock
        self._patience = Patience()
        self.num_sessions = 0
        """Registrations that the manager has accepted."""
        self.num_failed_calls = 0
        """Mutating calls that were not executed or not answered."""
        self.has_left = False
        """Whether the manager has confirmed that this process has no session, and none will start."""
        self._keep_alive_seconds = 1.0
        self._keep_alive_deadline = CALL_SECONDS
        self._lease_seconds = 0.0
        self._heard_at = 0.0
        """When a Register or a heartbeat of this session was last answered."""
        self._complained = False
        self._is_away = False
        """Whether no manager answered the last call: then the next one waits for a connection, and is sent as soon as there is
        one."""
        self._heartbeat_due = asyncio.Event()
        self._is_announced = False
        """Whether the last call of on_session was with True."""

    @property
    def highest_epoch(self) -> int:
        """The manager's highest epoch that this process has seen since it last held no blocks."""
        return self._registration.highest_epoch

    def send_heartbeat(self) -> None:
        """Send the next heartbeat at once: it has news for the manager."""
        self._heartbeat_due.set()

    async def run(self) -> None:
        """Connect and `talk_to` the manager until cancelled. Raises RegistrationRefused."""
        async with contextlib.aclosing(ManagerChannel(self._address)) as channel:
            await self.talk_to(channel.stub)

    async def talk_to(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Register, send calls, and register again when the session is lost, until cancelled. Raises RegistrationRefused."""
        try:
            while True:
                await self._register(stub)
                await self._hold_session(stub)
                self._announce(False)
                await self._until_reset()
                await asyncio.sleep(REGISTER_PAUSE_SECONDS)
        finally:
            await self._leave(stub)

    # -- sessions

    async def _hold_session(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Send calls and heartbeats until the session is lost. If one of the two tasks fails, both end."""
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
            request = self._registration.next_request(holds_state=self._cache.state.holds_anything)
            try:
                response = await stub.Register(request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
            except grpc.aio.AioRpcError as error:
                if details_of(error).reason == "FOREIGN_EPOCH":
                    # It cannot raise its epoch above that of the blocks held here: all streams end, all blocks are forgotten.
                    self._cache.state.give_up(error.details() or "", is_defect=False)
                    await self._until_reset()
                    self._registration.forget_manager()
                    continue
                await asyncio.sleep(self._on_register_failed(error))
                continue
            self._complained = self._is_away = False
            self._registration.on_answer(response)
            self._patience.restore()
            self.num_sessions += 1
            self._keep_alive_seconds = response.keep_alive_interval_ms / 1000
            self._lease_seconds = response.lease_ms / 1000
            # A lost heartbeat must leave time for the next, also under a short lease.
            self._keep_alive_deadline = min(CALL_SECONDS, self._lease_seconds / 4)
            self._heard_at = self._clock()
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
                self.send_heartbeat()  # the new session does not know that this worker is draining
            return

    def _on_register_failed(self, error: grpc.aio.AioRpcError) -> float:
        """Seconds to the next Register. Raises RegistrationRefused if a retry is of no use."""
        self._is_away = _is_of_nobody(error)
        details = details_of(error)
        reason, code = details.reason, error.code()
        self._registration.on_error(error)
        pause: float | None = REGISTER_RETRY_SECONDS
        if reason in PASSING:
            if not self._patience.is_waiting:
                log.warning("another process has this worker's name", manager=self._address, why=error.details())
            pause = self._patience.pause(details.retry_seconds or 0.0, self._clock())
        elif code in FINAL:
            pause = None
        else:
            self._patience.restore()
            if not self._complained:
                self._complained = True
                log.warning("waiting for the manager", manager=self._address, why=error.details() or code.name)
        if code is grpc.StatusCode.UNIMPLEMENTED and not reason:
            raise RegistrationRefused(
                f"{self._address} is not the address of a cache manager, perhaps that of a worker: its server does not know "
                "Register; name the manager's with --manager"
            )
        if pause is None:
            raise RegistrationRefused(
                f"the manager at {self._address} refused this worker: {error.details()} ({reason or code.name})"
            )
        return pause

    def _announce_if_ready(self) -> None:
        """Report that the session works, if its report is complete."""
        if self._cache.is_ready():
            self._announce(True)

    def _announce(self, works: bool) -> None:
        if works != self._is_announced:
            self._is_announced = works
            self._on_session(works)

    async def _until_reset(self) -> None:
        """If all blocks are given up, wait until the engine has ended its streams and steps and forgotten the blocks."""
        while self._cache.state.is_given_up:
            self._engine.on_cache_changed()
            self._engine.changed_for_link.clear()
            if self._cache.state.is_given_up:
                await self._engine.changed_for_link.wait()

    async def _leave(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """End this process's session at the manager, even one whose Register was not answered.

        An unanswered Register may be executed after a Deregister, and its session would last until its lease ends. One more
        Register with a larger number prevents that: it fences the session of the earlier one, or the earlier one is refused if it
        arrives later. It sets holds_state, so that Route does not return the session.
        """
        registration = self._registration
        give_up_at = self._clock() + LEAVE_SECONDS
        while not registration.is_settled and (seconds_left := give_up_at - self._clock()) > 0:
            request = registration.next_request(holds_state=True)
            try:
                registration.on_answer(await stub.Register(request, timeout=seconds_left))
            except grpc.aio.AioRpcError as error:
                registration.on_error(error)
                if not registration.is_settled:
                    await asyncio.sleep(REGISTER_RETRY_SECONDS)
        if not registration.is_settled:
            log.info("left without deregistering", why="a registration was not answered")
        if not registration.session:
            return
        leave = cache_pb2.DeregisterRequest(session=registration.session, session_key=registration.session_key)
        try:
            await stub.Deregister(leave, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("left without deregistering", why=error.details())
        else:
            self.has_left = registration.is_settled and registration.was_last_accepted

    async def _keep_alive(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        session, sent_at, is_late = self._registration.session, self._clock(), False
        while True:
            # From heartbeat to heartbeat: one that was not answered delays the next by nothing.
            await _wait_at_most(self._heartbeat_due, max(0.0, sent_at + self._keep_alive_seconds - self._clock()))
            self._heartbeat_due.clear()
            sent_at = self._clock()
            request = self._cache.keep_alive(self._engine.load(), draining=self._engine.is_draining)
            if request is None:
                continue
            try:
                response = await stub.KeepAlive(request, timeout=self._keep_alive_deadline)
            except grpc.aio.AioRpcError as error:
                reason = details_of(error).reason
                if reason in SESSION_OVER:
                    self._cache.state.lose_session(SESSION_OVER[reason])
                    self._engine.on_cache_changed()
                    self._engine.changed_for_link.set()
                    return
                log.debug("heartbeat not answered", why=error.details())
                is_late = True
                if self._is_announced and self._clock() - self._heard_at > self._lease_seconds:
                    # The lease is over: a manager that runs has ended the session, or gets no heartbeat of it.
                    log.warning("session does not work", silent_seconds=self._lease_seconds, why=error.details())
                    self._announce(False)
                continue
            self._heard_at = self._clock()
            self._cache.on_keep_alive(session, response)
            if is_late:
                is_late = False
                self.send_heartbeat()  # only one that acknowledges this answer renews the lease
            self._announce_if_ready()
            self._engine.on_cache_changed()

    # -- calls

    async def _talk(self, stub: cache_pb2_grpc.CacheServiceStub) -> None:
        """Send call after call until the session is lost, or the engine has reset the cache."""
        engine, cache = self._engine, self._cache
        while cache.session == self._registration.session:
            engine.changed_for_link.clear()
            now = self._clock()
            call = cache.next_call(engine.scheduler.candidates, now)
            if call is not None:
                await self._send(stub, call)
                engine.on_cache_changed()
                continue
            at = cache.next_call_at(now)
            await _wait_at_most(engine.changed_for_link, None if at is None else max(0.001, at - now))

    async def _send(self, stub: cache_pb2_grpc.CacheServiceStub, call: MutatingCall) -> None:
        methods: dict[type, Any] = {
            cache_pb2.AllocateRequest: stub.Allocate,
            cache_pb2.AppendRequest: stub.Append,
            cache_pb2.ForkRequest: stub.Fork,
            cache_pb2.FreeRequest: stub.Free,
            cache_pb2.ReportRequest: stub.Report,
        }
        method = methods[type(call.request)]
        try:
            response = await method(call.request, timeout=CALL_SECONDS, wait_for_ready=self._is_away)
        except grpc.aio.AioRpcError as error:
            self._on_call_failed(call, error)
        else:
            self._is_away = False
            self._cache.on_reply(call, response, self._clock())
            self._announce_if_ready()

    def _on_call_failed(self, call: MutatingCall, error: grpc.aio.AioRpcError) -> None:
        self.num_failed_calls += 1
        self._is_away = _is_of_nobody(error)
        reason = details_of(error).reason
        # The end of the session is logged instead.
        is_logged_later = reason == "STALE_CALL" or reason in SESSION_OVER
        retriable = is_logged_later or error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        )
        level = logging.ERROR if not retriable else logging.DEBUG if is_logged_later else logging.INFO
        log.log(level, "call not executed", why=error.details(), code=error.code().name)
        if retriable:
            self._cache.on_failure(call, reason, self._clock())
        else:
            # The same call would be refused again.
            self._cache.on_refused(call, error.details() or error.code().name)


def _is_of_nobody(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call may have failed for lack of a manager; one that starts or stops returns these codes too."""
    code = error.code()
    return code is grpc.StatusCode.UNAVAILABLE or code is grpc.StatusCode.DEADLINE_EXCEEDED


async def _wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
