"""The routes of the page: /api, which it reads, and its files."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from .explain import explain


def page_routes() -> list[BaseRoute]:
    """All of them."""
    return [Route("/api/explain", explain, methods=["POST"])]
