"""The routes of OpenAI's API."""

from __future__ import annotations

from starlette.routing import BaseRoute

from .chat import chat_route
from .completions import completion_route
from .models import model_routes
from .token_bytes import TokenBytesOfModels
from .tokens import token_routes


def openai_routes() -> list[BaseRoute]:
    """Return the routes of OpenAI's API, and those that vLLM adds."""
    tokens_of_models = TokenBytesOfModels()
    return [
        chat_route(tokens_of_models),
        completion_route(tokens_of_models),
        *model_routes(),
        *token_routes(tokens_of_models),
    ]
