"""What each client of OpenAI's API and each router is tried with. lm-eval is no row: it compares scores (`test_lm_eval.py`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

VARIABLE: Final = "KVPOOL_TEST_CLIENTS"
"""Set by `make test SUITE=clients`: the names of the clients that are tried."""


class Client(NamedTuple):
    """What a driver tries, and how its client passes on what it gets."""

    subject: str
    """Of its chats and texts. Each has its own, so what others left in the cache is no prefix."""
    exception: str
    """In which a refusal arrives."""
    refused: Mapping[str, str]
    """By what the driver asks for: the field that the gateway refuses."""
    passes_param_on: bool = True
    """Whether the exception has the name of the field."""
    chats: bool = True
    texts: bool = True
    """Whether the client continues texts."""
    text_usage: bool = True
    """Whether it passes on the usage of a text."""


CLIENTS: Final[Mapping[str, Client]] = {
    "instructor": Client(  # always asks for JSON of a schema, so all it can get is a refusal
        "Cathedrals",
        "InstructorRetryException",
        {"tools": "tool_choice", "json_schema": "response_format"},
        chats=False,
        texts=False,
    ),
    "langchain-openai": Client(
        "Volcanoes",
        "OpenAIInvalidRequestError",
        {
            "tools": "tools",
            "function_calling": "tool_choice",
            "json_schema": "response_format",
            "json_mode": "response_format",
        },
        text_usage=False,
    ),
    "litellm": Client(
        "Glaciers", "BadRequestError", {"tools": "tools", "response_format": "response_format"}, passes_param_on=False
    ),
    "llama-index": Client("Lighthouses", "BadRequestError", {"tools": "tools", "response_format": "response_format"}),
    "openai-agents": Client(
        "Windmills", "BadRequestError", {"tools": "tools", "output_type": "response_format"}, texts=False
    ),
    "pydantic-ai": Client(
        "Harbours",
        "ModelRequestRejectedError",
        {"tools": "tools", "output_tool": "tool_choice", "output_schema": "response_format"},
        texts=False,
    ),
}

ROUTERS: Final[Mapping[str, Sequence[str]]] = {
    "smg": ["smg", "launch", "--backend", "vllm", "--policy", "cache_aware"],
    # Not by its default, cache_aware: that first asks `/v1/chat/completions/render` for token ids, which gateways do not have, and
    # without them sends all requests to one gateway while that has few.
    "vllm-router": ["vllm-router", "--policy", "round_robin"],
}
"""The program of each and its arguments, but for those that all have (`test_routers.py`)."""


def chosen(names: Mapping[str, object]) -> list[str]:
    """Those of the names that this run tries."""
    return sorted(set(names) & set(os.environ.get(VARIABLE, "").split()))
