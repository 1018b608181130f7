"""The events of a generation, to its end or to its error."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Final

import structlog

from kvpool.client import KvpoolError

from .errors import openai_error

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

DONE: Final = b"data: [DONE]\n\n"


async def to_the_end(events: AsyncIterator[bytes], prompt_field: str) -> AsyncGenerator[bytes, None]:
    """Yield the events, then [DONE] or, after an error, an event that says so."""
    last = DONE
    try:
        async for event in events:
            yield event
    except KvpoolError as error:
        last = b"event: error\n" + data(openai_error(error, prompt_field).body)
    except Exception:
        log.exception("stream failed")
        last = b'event: error\ndata: {"error":{"message":"the gateway failed, which is a defect; its log has the ' + (
            b'traceback","type":"server_error","param":null,"code":"internal_error"}}\n\n'
        )
    yield last


def data(message: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
