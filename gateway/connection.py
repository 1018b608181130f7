"""uvicorn's connection, with limits that uvicorn does not have.

A caller has a time for each stage: to begin a request, to send its head, to send its body, to take its answer. A time begins with
the stage, and single bytes do not renew it, so a caller cannot hold a connection by sending one now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, NoReturn

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import ApiError

ENDLESS_PATHS: Final = frozenset({"/api/watch"})
"""Paths whose answers have no end of their own."""
MAX_HEAD_BYTES: Final = 64 << 10
MAX_TRAILER_BYTES: Final = 8 << 10
"""Most bytes after the body of a request, or of a chunk's extensions; all of them are dropped."""
MAX_PIPELINED: Final = 64
"""Requests that may wait for the answer to the one before them. Each takes a hundred times its bytes."""
MAX_REFUSED: Final = 64
"""Connections over the limit that are answered at the same time; more are closed without an answer."""
_CLOSING_SECONDS: Final = 1.0


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of all connections of one server, and how often each was reached."""

    max_connections: int
    idle_seconds: float
    head_seconds: float
    body_seconds: float
    reader_seconds: float
    num_connections: int = 0
    """Connections that are served now."""
    num_refused: int = 0
    """Connections that are refused now because there are too many."""
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("idle", "head", "body", "reader", "full"), 0))
    """Connections that were closed, by the limit that they reached."""


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits; the class that `bounded` makes sets `limits`."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._stage = ""
        self._num_head_bytes = 0
        self._num_unread_bytes = 0
        self._num_trailer_bytes = 0
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._running: RequestResponseCycle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._is_counted = self.limits.num_connections < self.limits.max_connections
        self._is_refused = not self._is_counted and self.limits.num_refused < MAX_REFUSED
        if not self._is_counted and not self._is_refused:
            self.limits.ended["full"] += 1
            self.transport.abort()
            return
        if self._is_refused:
            self.limits.num_refused += 1
            self._refuse(
                "full",
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the gateway has {self.limits.max_connections} connections already (--max-connections): try again later",
            )
            return
        self.limits.num_connections += 1
        self._enter("idle", self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.num_connections -= self._is_counted
        self.limits.num_refused -= self._is_refused
        self._leave_stage()
        self._stop_reader_timer()
        super().connection_lost(exc)

    # -- stages of a request

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._stage == "closing":
            return
        if self._stage == "idle":
            self._num_head_bytes = 0
            self._enter("head", self.limits.head_seconds)
        if self._stage in ("head", ""):
            self._num_head_bytes += len(data)
        self._num_unread_bytes += len(data)
        super().data_received(data)
        if self._stage == "body" and self._num_unread_bytes > MAX_TRAILER_BYTES:
            self._refuse("body", *_TRAILERS)
            return
        # A body that came with its head is counted too, so the limit holds only while the head is not complete. A head may also
        # come while the request before it is still answered.
        if self._stage in ("head", "") and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                "head",
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request's head may have {MAX_HEAD_BYTES} bytes: shorten its path and headers",
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage != "body":
            super().on_header(name, value)
            return
        # A trailer. Nothing reads one.
        self._num_trailer_bytes += len(name) + len(value) + _HEADER_BYTES
        if self._num_trailer_bytes > MAX_TRAILER_BYTES:
            self.limits.ended["body"] += 1
            self._reject(*_TRAILERS)

    def on_headers_complete(self) -> None:
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            # Which one counts is each program's own guess, a proxy's before this one among them.
            self._reject(HTTPStatus.BAD_REQUEST, "a request has one Host: send the header once")
        if b"transfer-encoding" in names and self.parser.get_http_version() != "1.1":
            self._reject(HTTPStatus.BAD_REQUEST, "Transfer-Encoding needs HTTP/1.1: send Content-Length, or HTTP/1.1")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._reject(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MAX_PIPELINED} requests wait on this connection: send the next one after an answer, or on another",
            )
        self._num_unread_bytes = self._num_trailer_bytes = 0
        self._enter("body", self.limits.body_seconds)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unread_bytes = 0
        super().on_body(body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._leave_stage()
        self._num_head_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete and not self.pipeline:
            # It was refused before its body had come.
            self._enter("idle", self.limits.idle_seconds)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._stage == "" and not self.pipeline:
            # uvicorn's own timer ends with the first byte after it, even with one that begins no request.
            self._unset_keepalive_if_required()
            self._enter("idle", self.limits.idle_seconds)
        self._limit_closing()

    def shutdown(self) -> None:
        super().shutdown()
        if self._stage == "closing":
            self.transport.close()
        elif self.cycle is not None and self.cycle.scope["path"] in ENDLESS_PATHS:
            # Its answer would last for the whole grace. A browser asks again, as after any lost connection.
            self.transport.close()
        self._limit_closing()

    def _enter(self, stage: str, seconds: float) -> None:
        self._leave_stage()
        self._stage = stage
        self._timer = self.loop.call_later(seconds, self._on_late)

    def _leave_stage(self) -> None:
        self._stage = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        stage = self._stage
        if stage == "closing":
            self.transport.abort()
            return
        if stage == "idle":
            self.limits.ended["idle"] += 1
            self.transport.close()
            self._limit_closing()
            return
        seconds = self.limits.head_seconds if stage == "head" else self.limits.body_seconds
        self._refuse(
            stage, HTTPStatus.REQUEST_TIMEOUT, f"a request's {stage} must come within {seconds:g} s: send it in one go"
        )
        self._limit_closing()

    def _refuse(self, limit: str, status: HTTPStatus, message: str) -> None:
        """Note that a limit was reached, answer if no answer has begun, and close."""
        self.limits.ended[limit] += 1
        self._end_with(status, message, in_body=limit == "body")

    def _end_with(self, status: HTTPStatus, message: str, *, in_body: bool) -> None:
        self._leave_stage()
        if self.transport.is_closing():
            return
        cycle = self._running
        # A complete answer is that of the request before, unless it came before the request's body.
        if cycle is None or not cycle.response_started or (cycle.response_complete and not in_body):
            self._answer_and_close(status, message)
        else:
            self.transport.close()

    def _answer_and_close(self, status: HTTPStatus, message: str) -> None:
        """Answer, then read and drop for a moment what the caller still sends: closing at once would reset the connection, and the
        answer could be lost. A request that is still being served ends as if its reader had left, and waiting ones are dropped."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.flow.resume_reading()
        self.transport.write(_raw_answer(status, message))
        with contextlib.suppress(OSError):  # it has gone already
            self.transport.write_eof()
        self._enter("closing", _CLOSING_SECONDS)

    def eof_received(self) -> None:
        if self._stage == "closing":
            self.transport.close()

    def _reject(self, status: HTTPStatus, message: str) -> NoReturn:
        """Stop the parser, from one of its callbacks: it reads no more, and `send_400_response` gives this answer."""
        self._refusal = (status, message)
        raise ValueError(message)

    def send_400_response(self, msg: str) -> None:
        """Answer when the parser has ended, because we rejected a request or because it is not HTTP. uvicorn would answer in plain
        text."""
        self._end_with(*(self._refusal or _NOT_HTTP), in_body=self._stage == "body")

    # -- readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()
        self._limit_closing()

    def _limit_closing(self) -> None:
        """Limit the time until the reader has taken the last bytes of a closing connection, which closes only then."""
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._start_reader_timer()

    def _start_reader_timer(self) -> None:
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.limits.reader_seconds, self._on_slow_reader)

    def _stop_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _on_slow_reader(self) -> None:
        """Abort the connection: its reader does not read, so no answer can reach it."""
        self.limits.ended["reader"] += 1
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """Make the protocol class for uvicorn whose connections have these limits."""
    return type("Connection", (BoundedConnection,), {"limits": limits})


_HEADER_BYTES: Final = len(b": \r\n")
_NOT_HTTP: Final = (HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1 as the gateway understands it")
_TRAILERS: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"trailers and extensions of chunks may have {MAX_TRAILER_BYTES} bytes, and are not read: leave them out",
)


def _raw_answer(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(ApiError(status, message).body).encode()
    head: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body
