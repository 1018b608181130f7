"""Serves GET /api/watch: the changes of the cluster as an event stream."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ..event_stream import EventStream
from .hub import PICTURE_MS, PageViewer
from .page import page_of
from .query import query_number

_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def watch(request: Request) -> Response:
    """Answer with events `manager`, `picture` and `requests`, for ?interval_ms=200&blocks=1. A larger interval gives fewer
    pictures, blocks=0 leaves out the state of each block."""
    interval_ms = query_number(request, "interval_ms", PICTURE_MS, least=100, most=10_000)
    blocks = query_number(request, "blocks", 1, most=1)
    # The manager's own interval passes anyway between two pictures.
    pause = max(0, interval_ms - PICTURE_MS) / 1000
    viewer = PageViewer(include_blocks=bool(blocks), pause_seconds=pause)
    return EventStream(page_of(request).hub.events(viewer), _HEADERS)
