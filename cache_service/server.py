"""The manager's gRPC server: services, limits, health, and the task that ends expired leases."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
from grpc_health.v1 import health_pb2

from kvpool.process.address import PortError, is_loopback
from kvpool.process.grpc_server import GrpcServer, Services
from kvpool.v1 import cache_pb2_grpc

from .core.manager import CacheManager
from .core.messages import Limits
from .counts import EdgeCounts
from .election.epoch import EpochStore
from .garbage import collect_young
from .leader_gate import LeaderGate
from .request_sizes import SERVICE, request_limits
from .servicer import CacheServicer
from .settings import ManagerSettings

if TYPE_CHECKING:
    from kvpool.process.metrics import MetricsPage, MetricsServer

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.manager")

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

_GRACE_SECONDS: Final = 1.0
"""Time for calls in flight when the manager stops; they take milliseconds."""

NOTICE_SECONDS: Final = 0.1
"""Time between NOT_SERVING and the end, in which peers that watch the health, or call, get a status and no broken connection."""


class ManagerServer:
    """A cache manager that listens. `async with` starts and stops it; make it inside the loop that runs it.

    If `epochs` does not lead yet, the server stands by until it does: it answers health and refuses calls. The server releases
    `epochs` when it stops. `clock` gives monotonic seconds.
    """

    manager: CacheManager
    """The core of the life in which this process leads; not set before."""
    _servicer: CacheServicer
    """The servicer of that life; not set before."""

    def __init__(
        self, settings: ManagerSettings, epochs: EpochStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._epochs = epochs
        self._clock = clock
        self._limits = Limits(max_total_blocks=settings.max_total_blocks, max_total_tokens=settings.max_total_tokens)
        self.port = 0
        """The port in use, once started."""
        self._grpc = GrpcServer(settings.host, settings.port, settings, clock=clock)
        self._counts = EdgeCounts()
        self._standby: LeaderGate | None = None
        self._has_begun = False
        """Whether this process leads or has led."""
        self._leading: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.metrics: MetricsServer | None = None
        """Server of /metrics; None: the settings name no port for it."""
        if epochs.leads():
            self._begin_life()
        else:
            self._standby = LeaderGate()

    def _begin_life(self) -> None:
        """Make an empty core under the epoch that this process leads with, and the servicer that answers its calls."""
        settings = self._settings
        self.manager = CacheManager(
            self._epochs.epoch,
            session_start=secrets.randbits(39),
            lease_seconds=settings.lease_seconds,
            tick_seconds=settings.tick_seconds,
            limits=self._limits,
            explain_evictions=settings.explain_evictions,
            explain_across_salts=settings.explain_across_salts,
        )
        self._servicer = CacheServicer(
            self.manager,
            self._epochs,
            keep_alive_seconds=settings.keep_alive_seconds,
            clock=self._clock,
            max_watchers=settings.max_watchers,
            max_watch_events=settings.watch_events,
            max_watch_seconds=settings.max_connection_age,
            counts=self._counts,
        )
        self._has_begun = True

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen and serve. Raises PortError."""
        await require_free(self._settings.host.strip("[]"), self._settings.port)
        self._grpc.bind()
        self.port = self._grpc.port
        if self._settings.metrics_port is not None:
            self.metrics = self._listen_for_metrics(self._settings.metrics_host, self._settings.metrics_port)
        answering: Any = self._servicer if self._standby is None else self._standby
        await self._grpc.health.set(SERVICE, _SERVING if self._standby is None else _NOT_SERVING)
        await self._grpc.start(
            Services(
                names=(SERVICE,),
                add_to=lambda server: cache_pb2_grpc.add_CacheServiceServicer_to_server(answering, server),
                limits=request_limits(self._limits),
                on_refused=self._counts.on_unread,
            )
        )
        if self._has_begun:
            self._ticking = asyncio.create_task(self._tick_for_ever(), name="manager-tick")
        self._leading = asyncio.create_task(self._lead(), name="manager-election")
        log.info(
            "listening" if self._standby is None else "standing by",
            address=self._grpc.address,
            epoch=self._epochs.epoch,
            state_dir=str(self._settings.state_folder),
        )
        if not is_loopback(self._settings.host):
            log.warning("listening beyond loopback without encryption or authentication", host=self._settings.host)
        if self.metrics is not None:
            await self.metrics.start()

    async def _lead(self) -> None:
        """Wait until no other process leads, then lead, and keep leading. Raises LeadershipLost, StateError."""
        if self._standby is not None:
            await self._epochs.lead()
            self._begin_life()
            self._standby.leading = self._servicer
            self._ticking = asyncio.create_task(self._tick_for_ever(), name="manager-tick")
            log.info("leads", address=self._grpc.address, epoch=self.manager.epoch)
            await self._grpc.health.set(SERVICE, _SERVING)
        await self._epochs.keep()

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Wait for `stopping`. Raises PortError if the gRPC server has ended and could not be replaced, LeadershipLost if another
        process may lead, StateError if this one can never lead."""
        assert self._leading is not None
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(stopping.wait()),
            asyncio.ensure_future(self._grpc.run()),
            asyncio.shield(self._leading),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        for wait in done:
            wait.result()

    async def stop(self, notice_seconds: float = NOTICE_SECONDS) -> None:
        """Report NOT_SERVING, refuse new calls, let those in flight end, and stop. Idempotent."""
        if self._leading is None:
            return
        leading, self._leading = self._leading, None
        await self._grpc.health.enter_graceful_shutdown()
        was_leading = self._epochs.leads()
        if self._has_begun:
            self._servicer.refuse_calls()
        # From here on this process changes nothing, so another one may lead at once.
        await self._epochs.release()
        if was_leading:
            await asyncio.sleep(notice_seconds)
        await self._grpc.stop(_GRACE_SECONDS)
        tasks = [leading] if self._ticking is None else [leading, self._ticking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.metrics is not None:
            await self.metrics.stop()
        log.info("stopped", epoch=self._epochs.epoch)

    def _listen_for_metrics(self, host: str, port: int) -> MetricsServer:
        # Imported only if used: it takes a tenth of the start, for which streams may be waiting after a restart.
        from kvpool.process.metrics import MetricsServer, listen_for_metrics

        from .metrics import ManagerMetrics

        def fill(page: MetricsPage) -> None:
            metrics.fill_process(page, leads=self._has_begun and self._epochs.leads())
            if self._has_begun:
                metrics.fill(page, self.manager, self._servicer.audits, self._clock())

        metrics = ManagerMetrics(self._counts, lambda: self._grpc.num_rebuilds)
        return MetricsServer(listen_for_metrics(host, port), fill, is_serving=self._grpc.is_answering)

    async def _tick_for_ever(self) -> None:
        has_more = False
        while True:
            await asyncio.sleep(0 if has_more else self._settings.tick_seconds)
            try:
                has_more = await self._tick()
            except Exception:
                has_more = False
                # Without ticks no lease would ever end, so one that fails must not be the last.
                log.exception("tick failed")

    async def _tick(self) -> bool:
        """End expired leases, sweep ended sessions in slices, and collect gRPC's cycles. Returns whether more is to be swept: peers
        may end sessions faster than they are swept, and leases must not wait for that."""
        until = self._clock() + self._settings.tick_seconds
        for session in self.manager.tick(self._clock()):
            log.warning("lease expired", worker_id=session.worker_id, session=f"{session.number:#x}")
        more = self.manager.sweep()
        while more and self._clock() < until:
            await asyncio.sleep(0)  # calls that have arrived meanwhile
            more = self.manager.sweep()
        collect_young()
        return more


async def require_free(host: str, port: int) -> None:
    """Raise PortError with the reason if an address cannot be listened on. gRPC itself writes the reason to stderr only."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PortError(f"cannot listen on host {host!r}: {error.strerror}; choose another --host") from None
    problems: list[OSError] = []
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortError(
                    f"cannot listen on {host} port {port}: it is in use, perhaps by another manager; choose another --port"
                ) from None
            problems.append(error)
    # A name may have several addresses, of which one must work: "localhost" without IPv6.
    if len(problems) == len(addresses):
        raise PortError(f"cannot listen on {host} port {port}: {problems[0].strerror}; choose another --host or --port")
