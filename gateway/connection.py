"""One connection: uvicorn's, with the limits that uvicorn does not have.

A caller has a time for each stage: to begin a request, to send its head, to send its body, to take its answer. A time begins with
the stage and is not renewed by single bytes, so a caller cannot hold a connection by sending one now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError

ENDLESS_PATHS: Final = frozenset({"/api/watch"})
"""Whose answers have no end of their own."""
MAX_HEAD_BYTES: Final = 64 << 10
_CLOSING_SECONDS: Final = 1.0


@dataclass(slots=True)
class ConnectionLimits:
    """Of all connections of one server, and how often each was reached."""

    max_connections: int
    idle_seconds: float
    head_seconds: float
    body_seconds: float
    reader_seconds: float
    num_connections: int = 0
    """That are served now."""
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("idle", "head", "body", "reader", "full"), 0))
    """Connections that were closed, by the limit that they reached."""


class BoundedConnection(HttpToolsProtocol):
    """`limits` is set by the class that `bounded` makes."""

    limits: ConnectionLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._stage = ""
        self._num_head_bytes = 0
        self._reader_timer: asyncio.TimerHandle | None = None
        self._is_counted = self.limits.num_connections < self.limits.max_connections
        if not self._is_counted:
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
        super().data_received(data)
        # A body that came with its head is counted too, so the limit holds only while the head is not complete. A head may also
        # come while the request before it is still answered.
        if self._stage in ("head", "") and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                "head",
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"a request's head may have {MAX_HEAD_BYTES} bytes: shorten its path and headers",
            )

    def on_headers_complete(self) -> None:
        self._enter("body", self.limits.body_seconds)
        super().on_headers_complete()

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
        if self.cycle is not None and self.cycle.scope["path"] in ENDLESS_PATHS:
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
        """Answer, if no answer has begun, and close."""
        self.limits.ended[limit] += 1
        self._leave_stage()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        # A complete answer is that of the request before, unless it came before the request's body.
        if cycle is None or not cycle.response_started or (cycle.response_complete and limit != "body"):
            self._answer_and_close(status, message)
        else:
            self.transport.close()

    def _answer_and_close(self, status: HTTPStatus, message: str) -> None:
        """What the caller still sends is read and dropped for a moment: to close at once would reset the connection, and the answer
        would be lost on its way. A request before it that is still being served ends as if its reader had left."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_raw_answer(status, message))
        with contextlib.suppress(OSError):  # it has gone already
            self.transport.write_eof()
        self._enter("closing", _CLOSING_SECONDS)

    def eof_received(self) -> None:
        if self._stage == "closing":
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Not HTTP. uvicorn's answer is plain text."""
        self._leave_stage()
        self._answer_and_close(HTTPStatus.BAD_REQUEST, "this is not HTTP/1.1 as the gateway understands it")

    # -- readers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_reader_timer()

    def resume_writing(self) -> None:
        self._stop_reader_timer()
        super().resume_writing()
        self._limit_closing()

    def _limit_closing(self) -> None:
        """A connection that closes does so only when its last bytes are taken: that too has a time."""
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
        """Nothing more can be said to this reader: it does not read."""
        self.limits.ended["reader"] += 1
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[BoundedConnection]:
    """The protocol class for uvicorn, whose connections have these limits."""
    return type("Connection", (BoundedConnection,), {"limits": limits})


def _raw_answer(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(ApiError(status, message).body).encode()
    head: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body
