"""A gRPC server that is rebuilt when it ends by itself.

All state is in the servicers, so a new server with the same servicers on the same port loses nothing. Calls in flight run to their
end on the old server, which is kept until then. With the loop of `serving_loop` no request is known that ends a server; with
grpcio's own, one whose `:path` is not UTF-8 does.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .address import PortError, join_host_port, reachable_host
from .rare_line import RareLine
from .request_guard import RequestGuard, RequestLimit
from .server_settings import MIN_CONNECTIONS, ServerSettings, descriptors_for_connections
from .serving_loop import KNOWN_GRPCIO, is_steady, new_server

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.server")

LOOK_SECONDS: Final = 0.1
"""Pause between two checks of whether the server has ended. A check reads an attribute of gRPC's and costs nothing."""
CONNECT_SECONDS: Final = 1.0
"""Pause between two connections to oneself, the only way to notice a listener that has gone without a word from gRPC."""
FIRST_PAUSE_SECONDS: Final = 0.05
"""First pause between two attempts to build a server; it doubles. The first attempt is made at once, however often servers have
ended: after a pause, a peer that ends one after the other would keep all others out."""
MAX_PAUSE_SECONDS: Final = 1.0
MAX_FAILED_BUILDS: Final = 5
"""Failed attempts in a row after which the process ends."""
MAX_RETIRED: Final = 64
"""Replaced servers that wait for their calls to end. Beyond that the oldest server's calls are ended. It takes some seconds of
attacks, each with a call that stays open, to get there."""
LAST_WORDS_SECONDS: Final = 1.0
"""Time for callers to read the statuses of calls that have ended."""


@dataclass(frozen=True)
class Services:
    """The services of a server, apart from health and reflection."""

    names: tuple[str, ...]
    """Full names of the services, for reflection."""
    add_to: Callable[[grpc.aio.Server], None]
    """Adds the servicers to a server; called for each one that is built."""
    limits: Mapping[str, RequestLimit]
    """Limits of requests by full method name."""
    on_refused: Callable[[str, str], None] | None = None
    """Called for each refused request; see RequestGuard.protect."""


@dataclass(eq=False)
class _Life:
    """One gRPC server."""

    server: grpc.aio.Server
    guard: RequestGuard
    port: int


class GrpcServer:
    """Binds a port, serves on it until it is stopped, and replaces the gRPC server when that ends. Use it in one event loop."""

    def __init__(
        self, host: str, port: int, settings: ServerSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._host = host
        self._clock = clock
        self._settings = settings
        self.port = port
        """The port in use, once bound."""
        self.health = health.aio.HealthServicer()
        """Servicer of health, whose state outlives the servers."""
        self.num_rebuilds = 0
        self._services: Services | None = None
        self._life: _Life | None = None
        self._is_serving = False
        self._retired: dict[_Life, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._max_connections = settings.max_connections
        self._refused_line = RareLine(log, "requests refused before they were read")
        self._rebuilt_line = RareLine(log, "the gRPC server ended by itself and was rebuilt")

    @property
    def address(self) -> str:
        """host:port on which it listens."""
        return join_host_port(self._host, self.port)

    def bind(self) -> None:
        """Take the port, without serving yet. Raises PortError."""
        self._max_connections = descriptors_for_connections(self._settings.max_connections)
        self._life = self._bound(self._max_connections)
        self.port = self._life.port

    async def start(self, services: Services) -> None:
        """Serve on the port; bind it if that was not done before. Raises PortError."""
        if self._life is None:
            self.bind()
        assert self._life is not None
        self._services = services
        if not is_steady():
            log.warning(
                "this version of grpcio is not known: a malformed path ends the gRPC server, which is then rebuilt; install one "
                "that kvpool was tested with",
                tested=[f"{beginning}*" for beginning in KNOWN_GRPCIO],
                grpcio=grpc.__version__,
            )
        _silence_ended_servers()
        await self._begin(self._life)
        self._watching = asyncio.create_task(self._watch(), name="grpc-server")

    async def run(self) -> None:
        """Wait until `stop`. Raises PortError if the server has ended and no other could be built."""
        assert self._watching is not None
        await asyncio.shield(self._watching)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, let those in flight on all servers end within the grace, and end the rest. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self._is_serving = False
        life, self._life = self._life, None
        ends = [_stop(retired.server, grace_seconds) for retired in self._retired]
        if life is not None:
            ends.append(_stop(life.server, grace_seconds))
        await asyncio.gather(*ends)
        for task in self._retired.values():
            task.cancel()
        await asyncio.gather(*self._retired.values(), return_exceptions=True)

    async def is_answering(self) -> bool:
        """Whether callers can reach the server at this moment."""
        return self._is_serving and not await self._is_refused()

    # -- building

    def _bound(self, max_connections: int) -> _Life:
        """Make a server that has the port. Raises PortError."""
        guard = RequestGuard(self._refused_line)
        server = new_server((guard,), self._settings.server_options(max_connections))
        address = join_host_port(self._host, self.port)
        try:
            port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortError(f"cannot listen on {address}: {error}") from None
        return _Life(server, guard, port)

    async def _begin(self, life: _Life) -> None:
        assert self._services is not None
        services = self._services
        life.guard.protect(services.limits, services.on_refused)
        services.add_to(life.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, life.server)
        reflection.enable_server_reflection(
            (*services.names, health.SERVICE_NAME, reflection.SERVICE_NAME), life.server
        )
        await life.server.start()
        self._is_serving = True

    # -- watching

    async def _watch(self) -> None:
        """Replace the server whenever it has ended. Raises PortError if that fails too often in a row."""
        while True:
            assert self._life is not None
            why = await self._end_of(self._life)
            self._is_serving = False
            self._retire(self._life)
            self._life = await self._build_anew()
            self.num_rebuilds += 1
            self._rebuilt_line.note(address=self.address, why=why, calls_on_replaced_servers=self._num_retired_calls())

    async def _end_of(self, life: _Life) -> str:
        """Wait until the server has ended; returns why."""
        connect_at = self._clock() + CONNECT_SECONDS
        while True:
            try:
                # With a time-out, because without one it waits for the calls in flight.
                if not await life.server.wait_for_termination(LOOK_SECONDS):
                    return "it has stopped"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            if self._clock() >= connect_at:
                if await self._is_refused():
                    return "connections are refused"
                connect_at = self._clock() + CONNECT_SECONDS

    async def _is_refused(self) -> bool:
        """Whether a connection to oneself is refused. Any other failure, a time-out included, is a sign of load, not of an end."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(reachable_host(self._host), self.port)
        except ConnectionRefusedError:
            return True
        except OSError as error:
            # A name with several addresses gives one error for all, without a number.
            return error.errno is None and "refused" in str(error)
        writer.transport.abort()
        return False

    async def _build_anew(self) -> _Life:
        pause = 0.0
        for num_failed in range(1, MAX_FAILED_BUILDS + 1):
            await asyncio.sleep(pause)
            try:
                # A connection on a replaced server has a call at least, since gRPC closes those without.
                life = self._bound(max(MIN_CONNECTIONS, self._max_connections - self._num_retired_calls()))
                await self._begin(life)
                return life
            except Exception as error:
                if num_failed > 1:  # the port may take a moment to be free
                    log.error("the gRPC server cannot be rebuilt", tries=num_failed, why=str(error))
                pause = min(MAX_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * pause))
                problem = error
        raise PortError(
            f"the gRPC server on {self.address} has ended and could not be rebuilt in {MAX_FAILED_BUILDS} tries: {problem}"
        )

    # -- replaced servers

    def _num_retired_calls(self) -> int:
        return sum(life.guard.num_calls for life in self._retired)

    def _retire(self, life: _Life) -> None:
        """Keep a server that has ended until its calls have ended too."""
        task = asyncio.create_task(self._see_off(life), name="grpc-server-replaced")
        self._retired[life] = task
        task.add_done_callback(lambda _: self._retired.pop(life, None))
        if len(self._retired) > MAX_RETIRED:
            next(iter(self._retired)).guard.stop_waiting()

    async def _see_off(self, life: _Life) -> None:
        await life.guard.wait_until_idle()
        # gRPC ends the calls that are left with UNAVAILABLE: a client of ours continues on another worker.
        await _stop(life.server, LAST_WORDS_SECONDS)


async def _stop(server: grpc.aio.Server, grace_seconds: float) -> None:
    """Stop a server, even one that has ended by an error. The first call then closes the listener and raises the error again."""
    for _ in range(2):
        try:
            await server.stop(grace_seconds)
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.debug("the gRPC server that was stopped had ended by an error", why=str(error))


# -- gRPC's own words


class _EndedServers(logging.Filter):
    """Drops the lines that grpc.aio and asyncio log when a server ends, which GrpcServer reports in one line a minute. Also drops
    the tracebacks that grpc.aio logs for a path that ends a server or only a call."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("Invalid encoding on"):
            return False
        error: Any = record.exc_info[1] if record.exc_info else record.msg
        if not isinstance(error, BaseException):
            error = record.msg
        return not (isinstance(error, BaseException) and _has_ended_a_server(error))


_FILTER: Final = _EndedServers()


def _silence_ended_servers() -> None:
    """Add the filter to the loggers concerned. May be repeated."""
    for name in ("asyncio", "grpc._cython.cygrpc"):
        logging.getLogger(name).addFilter(_FILTER)


def _has_ended_a_server(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name.endswith("_server_main_loop") for frame, _ in frames)
