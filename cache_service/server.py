"""The manager's gRPC server: services, limits, health, and the task that lets leases run out."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from kvpool.process.address import PortError, is_loopback
from kvpool.v1 import cache_pb2, cache_pb2_grpc

from .core.manager import CacheManager
from .core.messages import Limits
from .epoch import EpochStore
from .garbage import collect_young
from .servicer import CacheServicer
from .settings import ManagerSettings

if TYPE_CHECKING:
    from kvpool.process.metrics import MetricsServer

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.manager")

MAX_MESSAGE_BYTES: Final = 16 << 20
"""Largest message, both ways: four prompts of a million tokens."""

SERVICE: Final[str] = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second manager on the port would share it, and each worker would meet now one and now the other.
    ("grpc.so_reuseport", 0),
    # Peers may ping every 10 s without a call in flight; a second of slack, because too early a ping ends in GOAWAY.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Our own pings find peers whose machine is gone, so that their connections do not stay for ever.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_GRACE_SECONDS: Final = 1.0
"""How long calls in flight may take to end when the manager stops; they take milliseconds."""

NOTICE_SECONDS: Final = 0.1
"""Between NOT_SERVING and the end: peers that watch the health or call hear of it, and not of a broken connection."""


class Server:
    """A cache manager that listens. `async with` starts and stops it; make it inside the loop that runs it.

    `epochs` has begun this life's epoch; the server does not close it. `clock` gives monotonic seconds.
    """

    def __init__(
        self, settings: ManagerSettings, epochs: EpochStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.manager = CacheManager(
            epochs.epoch,
            session_start=secrets.randbits(39),
            lease_seconds=settings.lease_seconds,
            tick_seconds=settings.tick_seconds,
            limits=Limits(max_total_blocks=settings.max_total_blocks, max_total_tokens=settings.max_total_tokens),
        )
        self.port = 0
        """The port in use, once started."""
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(options=_OPTIONS)
        self._servicer = CacheServicer(
            self.manager, epochs, keep_alive_seconds=settings.keep_alive_seconds, clock=clock
        )
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self._servicer, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        self._ticking: asyncio.Task[None] | None = None
        self.metrics: MetricsServer | None = None
        """Answers /metrics, once started and if the settings name a port for it."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen and serve. Raises PortError."""
        await require_free(self._settings.host.strip("[]"), self._settings.port)
        try:
            self.port = self._grpc.add_insecure_port(self._settings.address)
        except RuntimeError as error:
            raise PortError(f"cannot listen on {self._settings.address}: {error}") from None
        if self._settings.metrics_port is not None:
            self.metrics = self._listen_for_metrics(self._settings.metrics_host, self._settings.metrics_port)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._grpc.start()
        self._ticking = asyncio.create_task(self._tick_for_ever(), name="manager-tick")
        address = self._settings.model_copy(update={"port": self.port}).address
        log.info("listening", address=address, epoch=self.manager.epoch, state_dir=str(self._settings.state_folder))
        if not is_loopback(self._settings.host):
            log.warning("listening beyond loopback without encryption or authentication", host=self._settings.host)
        if self.metrics is not None:
            await self.metrics.start()

    async def stop(self, notice_seconds: float = NOTICE_SECONDS) -> None:
        """Report NOT_SERVING, refuse further calls, let those in flight end, and stop. Idempotent."""
        if self._ticking is None:
            return
        ticking, self._ticking = self._ticking, None
        await self._health.enter_graceful_shutdown()
        self._servicer.refuse_calls()
        await asyncio.sleep(notice_seconds)
        await self._grpc.stop(_GRACE_SECONDS)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        if self.metrics is not None:
            await self.metrics.stop()
        log.info("stopped", epoch=self.manager.epoch)

    def _listen_for_metrics(self, host: str, port: int) -> MetricsServer:
        # Imported by those who want it: streams wait for a manager that is started anew, and this takes a tenth of its start.
        from kvpool.process.metrics import MetricsServer, listen_for_metrics

        from .metrics import ManagerMetrics

        metrics = ManagerMetrics(self.manager, self._servicer.counts, self._servicer.audits)
        return MetricsServer(listen_for_metrics(host, port), lambda page: metrics.fill(page, self._clock()))

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            try:
                await self._tick()
            except Exception:
                # Without ticks no lease would ever end, so one that fails must not be the last.
                log.exception("tick failed")

    async def _tick(self) -> None:
        """End the leases that have run out, take up in slices what fenced sessions left, and drop gRPC's cycles."""
        for session in self.manager.tick(self._clock()):
            log.warning("lease expired", worker_id=session.worker_id, session=f"{session.number:#x}")
        more = self.manager.sweep()
        while more:
            await asyncio.sleep(0)  # calls that have arrived meanwhile
            more = self.manager.sweep()
        collect_young()


async def require_free(host: str, port: int) -> None:
    """Raise PortError, which says why, if an address cannot be listened on. gRPC itself says why on stderr only."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PortError(f"cannot listen on host {host!r}: {error.strerror}; choose another --host") from None
    problems: list[OSError] = []
    for family, kind, protocol, _, address in found:
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
    # A name may stand for several addresses, of which one has to work: "localhost" without IPv6.
    if len(problems) == len(found):
        raise PortError(f"cannot listen on {host} port {port}: {problems[0].strerror}; choose another --host or --port")
