"""Runs an accepted request and makes its response: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError

from ..context import Gateway, gateway_of
from ..disconnect import unless_reader_leaves
from ..errors import ApiError
from .errors import openai_error
from .event_stream import GenerationEvents
from .generation import GenerationStreams


class RouteAnswer(Protocol):
    """Turns the pieces of a generation into the response of one route."""

    def events(self) -> AsyncIterator[bytes]:
        """Yield all events but the last, [DONE]."""
        ...

    async def whole(self) -> dict[str, Any]:
        """Return the body of a response that is no stream."""
        ...


async def respond(
    request: Request,
    generation: GenerationStreams,
    answer: RouteAnswer,
    *,
    stream: bool,
    prompt_field: str,
    headers: Mapping[str, str],
) -> Response | GenerationEvents:
    """Run the generation and return the response. Raises ApiError for an error before the first token."""
    gateway = gateway_of(request)
    await generation.__aenter__()
    try:
        await unless_reader_leaves(request.receive, generation.begin())
        if stream:
            # The response ends the generation.
            return GenerationEvents(gateway, generation, answer.events(), prompt_field=prompt_field, headers=headers)
        whole = await unless_reader_leaves(request.receive, answer.whole())
    except BaseException as error:
        await generation.__aexit__(None, None, None)
        if isinstance(error, KvpoolError):
            raise openai_error(error, prompt_field) from error
        raise
    await generation.__aexit__(None, None, None)
    return JSONResponse(whole, headers=headers)


def check_count(gateway: Gateway, n: int, num_prompts: int = 1) -> None:
    """Raise ApiError if these are too many answers or prompts."""
    settings = gateway.settings
    for name, number, most, flag in (
        ("n", n, settings.max_n, "--max-n"),
        ("prompt", num_prompts, settings.max_prompts, "--max-prompts"),
        ("n", n * num_prompts, settings.max_streams, "--max-streams"),
    ):
        if number > most:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{name}: {number} answers or prompts in one request, this gateway takes {most} ({flag}): send several requests",
                param=name,
                code="invalid_value",
            )
