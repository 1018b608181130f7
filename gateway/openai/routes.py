"""The routes of OpenAI's API."""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from .chat import chat
from .completions import complete
from .models import list_models, show_model
from .tokens import detokenize, tokenize


def openai_routes() -> list[BaseRoute]:
    """Return the routes of OpenAI's API, and those that vLLM adds."""
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", show_model, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
