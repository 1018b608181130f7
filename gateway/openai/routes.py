"""The routes of OpenAI's API."""

from __future__ import annotations

from starlette.routing import BaseRoute


def openai_routes() -> list[BaseRoute]:
    """All of them, and those that vLLM adds."""
    return []
