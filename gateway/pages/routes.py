"""The routes of the page: /api, which it reads, and its files."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from .block import block
from .drain import drain
from .explain import explain
from .files import file_routes
from .prefixes import prefixes
from .requests import requests
from .stories import stories
from .watch import watch


def page_routes(*, has_login: bool) -> list[BaseRoute]:
    """Return all routes of the page. `has_login`: the gateway has keys, so viewers have sessions."""
    return [
        Route("/api/watch", watch, methods=["GET"]),
        Route("/api/block", block, methods=["GET"]),
        Route("/api/explain", explain, methods=["POST"]),
        Route("/api/drain", drain, methods=["POST"]),
        Route("/api/prefixes", prefixes, methods=["GET"]),
        Route("/api/requests", requests, methods=["GET"]),
        Route("/api/stories", stories, methods=["GET"]),
        *file_routes(has_login=has_login),
    ]
