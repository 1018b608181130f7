"""The gateway's HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
from collections.abc import Iterator
from typing import Any, Final, Self

import structlog
import uvicorn

from kvpool.process.address import is_loopback, join_host_port, listen, reachable_host
from kvpool.process.rare_line import RareLine
from kvpool.process.server_settings import descriptors_for_connections

from .app import connection_limits, make_app
from .connection import bounded
from .settings import GatewaySettings

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

_BACKLOG: Final = 128
"""Connections that wait to be accepted. Without descriptors for them the event loop logs an error for each, every second."""
_POLL_SECONDS: Final = 0.01
_TICK_SECONDS: Final = 0.1
"""Length of uvicorn's ticks."""
_OUT_OF_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class _Uvicorn(uvicorn.Server):
    """uvicorn without its handling of signals, which is the process's."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def begin_to_stop(self) -> None:
        """Let `serve` end at once, not at the next tick."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Run uvicorn's loop, but wake up at `begin_to_stop`."""
        for tick in itertools.count():
            if await self.on_tick(tick):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve. Raises RuntimeError if the application does not start, where uvicorn would end the whole process."""
        try:
            await super().serve(sockets)
        except SystemExit:
            raise RuntimeError("the gateway's application did not start; the log says why") from None


class GatewayServer:
    """Listens and serves. `async with` starts and stops it; make it inside the loop that runs it."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self.port = 0
        """The port in use, once started."""
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the server for this machine."""
        return f"http://{join_host_port(reachable_host(self._settings.host), self.port)}"

    async def __aenter__(self) -> Self:
        """Listen and serve. Raises PortError."""
        settings = self._settings
        listener = listen(settings.host, settings.port, backlog=_BACKLOG)
        self.port = listener.getsockname()[1]
        limits = connection_limits(settings)
        limits.max_connections = descriptors_for_connections(settings.max_connections)
        _complain_rarely(asyncio.get_running_loop())
        uvicorns_log = logging.getLogger("uvicorn.error")
        uvicorns_log.setLevel(logging.ERROR)  # only here it says why the application did not start
        config = uvicorn.Config(
            make_app(settings, limits),
            http=bounded(limits),
            loop="none",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=round(settings.grace_seconds),
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="gateway-http")
        while not self._server.started:
            if self._serving.done():
                listener.close()
                self._serving.result()
                raise RuntimeError("the HTTP server has ended before it started")
            await asyncio.sleep(_POLL_SECONDS)
        # From here on the application itself logs requests and their failures.
        uvicorns_log.setLevel(logging.CRITICAL + 1)
        log.info("listening", url=self.url, manager=settings.manager, keys=len(settings.keys))
        if not is_loopback(settings.host):
            log.warning("listening beyond loopback without encryption", host=settings.host)
            if not settings.keys:
                log.warning("anybody who reaches this port may use the cluster: --no-api-key", host=settings.host)
        return self

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Wait for `stopping`. Raises the error that ended the HTTP server."""
        assert self._serving is not None
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({waiting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._serving.done():
            self._serving.result()

    async def __aexit__(self, *_: object) -> None:
        """Take no more requests, let the running ones end within the grace, and stop."""
        assert self._server is not None
        assert self._serving is not None
        self._server.begin_to_stop()
        await asyncio.gather(self._serving, return_exceptions=True)
        log.info("stopped")


def _complain_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Log one line a minute about connections that cannot be accepted for lack of descriptors or memory."""
    line = RareLine(log, "connections wait: the system has no descriptor or no memory for them")
    before = loop.get_exception_handler()

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES:
            line.note(error=error.strerror)
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(on_error)
