"""All routes of the gateway. A route without methods is for GET."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from . import page_routes, status_routes
from .access import AccessKeys
from .login import login_routes
from .openai.chat import chat
from .openai.completions import complete
from .openai.models import list_models, show_model
from .openai.tokens import detokenize, tokenize
from .pages.files import file_routes


def all_routes(keys: AccessKeys) -> list[BaseRoute]:
    """Return the gateway's own routes, those of OpenAI's API with what vLLM adds, and those of the page."""
    return [
        Route("/health", status_routes.health),
        Route("/version", status_routes.version),
        Route("/load", status_routes.load),
        Route("/server_info", status_routes.server_info),
        Route("/metrics", status_routes.metrics),
        *login_routes(keys),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", show_model),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/api/watch", page_routes.watch),
        Route("/api/block", page_routes.block),
        Route("/api/explain", page_routes.explain, methods=["POST"]),
        Route("/api/drain", page_routes.drain, methods=["POST"]),
        Route("/api/prefixes", page_routes.prefixes),
        Route("/api/requests", page_routes.requests),
        *file_routes(has_login=bool(keys)),
    ]
