"""Sends an answer as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import structlog
from starlette.types import Receive, Scope, Send

from kvpool.client import KvpoolError

from ..context import Gateway
from ..disconnect import ReaderLeft, unless_reader_leaves
from .errors import openai_error
from .generation import GenerationStreams

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

DONE: Final = b"data: [DONE]\n\n"


class GenerationEvents:
    """A response as an ASGI application. It ends the generation in any case."""

    def __init__(
        self,
        gateway: Gateway,
        generation: GenerationStreams,
        events: AsyncIterator[bytes],
        *,
        prompt_field: str,
        headers: Mapping[str, str],
    ) -> None:
        """`generation` was entered and has begun; `events` are made of its pieces and end before [DONE]."""
        self._gateway = gateway
        self._generation = generation
        self._events = events
        self._prompt_field = prompt_field
        self._headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await unless_reader_leaves(receive, self._send(send))
        except ReaderLeft:
            self._gateway.metrics.lost_readers += 1
        finally:
            await self._generation.__aexit__(None, None, None)

    async def _send(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = DONE
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except KvpoolError as error:
            last = b"event: error\n" + data(openai_error(error, self._prompt_field).body)
        except Exception:
            log.exception("stream failed")
            last = (
                b'event: error\ndata: {"error":{"message":"the gateway failed, which is a defect; its log has the '
                + (b'traceback","type":"server_error","param":null,"code":"internal_error"}}\n\n')
            )
        await send({"type": "http.response.body", "body": last})


def data(message: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
