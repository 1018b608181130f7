"""The routes of OpenAI's API."""

from __future__ import annotations

from starlette.routing import BaseRoute

from .chat import chat_route
from .completions import completion_route
from .models import model_routes
from .token_bytes import TokenBytesOfModels
from .tokens import token_routes


def openai_routes() -> list[BaseRoute]:
    """All of them, and those that vLLM adds."""
    known = TokenBytesOfModels()
    return [chat_route(known), completion_route(known), *model_routes(), *token_routes(known)]
