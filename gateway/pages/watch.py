"""Serves GET /api/watch: the changes of the cluster as an event stream."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError
from ..event_stream import EventStream
from .hub import PICTURE_MS, PageViewer
from .page import page_of

INTERVAL_MS: Final = (100, 10_000)
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def watch(request: Request) -> Response:
    """Answer with events `manager`, `picture` and `requests`, for ?interval_ms=200&blocks=1. A larger interval gives fewer
    pictures, blocks=0 leaves out the state of each block."""
    interval_ms = _interval_ms(request.query_params.get("interval_ms", str(PICTURE_MS)))
    blocks = request.query_params.get("blocks", "1")
    if blocks not in ("0", "1"):
        raise ApiError(400, f"blocks is 0 or 1, got {blocks[:64]!r}", param="blocks")
    # The manager's own interval passes anyway between two pictures.
    pause = max(0, interval_ms - PICTURE_MS) / 1000
    viewer = PageViewer(include_blocks=blocks == "1", pause_seconds=pause)
    return EventStream(page_of(request).hub.events(viewer), _HEADERS)


def _interval_ms(text: str) -> int:
    least, most = INTERVAL_MS
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not least <= int(text) <= most:
        raise ApiError(400, f"interval_ms is {least} to {most}, got {text[:64]!r}", param="interval_ms")
    return int(text)
