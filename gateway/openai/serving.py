"""Runs an accepted request and makes its response: whole, or as a stream of events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar
from uuid import uuid4

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import Completion, KvpoolError

from ..context import Gateway, gateway_of
from ..errors import invalid
from ..event_stream import EventStream, unless_reader_leaves
from .bodies import GenerationBody
from .errors import openai_error
from .generation import GenerationStreams
from .usage import encode_usage

log: structlog.stdlib.BoundLogger = structlog.get_logger("kvpool.gateway")

DONE: Final = b"data: [DONE]\n\n"

B = TypeVar("B", bound=GenerationBody)


class GenerationAnswer(ABC, Generic[B]):
    """Turns the pieces of a generation into the response of one route."""

    prompt_field: ClassVar[str]
    """Field of the body that has the prompt."""
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """Kind of the object that is the whole answer."""

    def __init__(self, body: B, generation: GenerationStreams) -> None:
        self.body = body
        self.generation = generation
        self._wants_ids = bool(body.return_token_ids)
        self._drops_generated = False
        """Whether the generated tokens are no part of the answer, and do not count."""
        self._id = f"{self.id_prefix}-{uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def events(self) -> AsyncIterator[bytes]:
        """Yield all events but the last, [DONE]."""

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the object of one answer in a response that is no stream."""

    async def whole(self) -> dict[str, Any]:
        """Return the body of a response that is no stream."""
        completions = await self.generation.completions()
        choices = [self.choice(index, completion) for index, completion in enumerate(completions)]
        return self._head(self.kind) | {"choices": choices, "usage": self._usage(completions)}

    def _usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return encode_usage(completions, self.generation.num_per_prompt, drop_generated=self._drops_generated)

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields with which each object of the answer begins."""
        model = self.generation.model
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.body.model or model.name,
            "system_fingerprint": model.fingerprint,
        }

    def _prompt_ids(self, choice: int) -> tuple[int, ...]:
        return self.generation.stream_of(choice).prompt_token_ids


async def respond(request: Request, answer: GenerationAnswer[B], headers: Mapping[str, str]) -> Response:
    """Run the generation and return the response. Raises ApiError for an error before the first token."""
    generation = answer.generation
    await generation.__aenter__()
    try:
        await unless_reader_leaves(request.receive, generation.begin())
        if answer.body.stream:
            # The response ends the generation.
            return _stream(gateway_of(request), answer, headers)
        whole = await unless_reader_leaves(request.receive, answer.whole())
    except BaseException as error:
        await generation.__aexit__(None, None, None)
        if isinstance(error, KvpoolError):
            raise openai_error(error, answer.prompt_field) from error
        raise
    await generation.__aexit__(None, None, None)
    return JSONResponse(whole, headers=headers)


def _stream(gateway: Gateway, answer: GenerationAnswer[B], headers: Mapping[str, str]) -> EventStream:
    async def on_end(has_left: bool) -> None:
        gateway.metrics.lost_readers += has_left
        await answer.generation.__aexit__(None, None, None)

    events = to_the_end(answer.events(), answer.prompt_field)
    return EventStream(events, {"Cache-Control": "no-cache", **headers}, on_end)


def check_count(gateway: Gateway, n: int, num_prompts: int = 1) -> None:
    """Raise ApiError if these are too many answers or prompts."""
    settings = gateway.settings
    for name, number, most, flag in (
        ("n", n, settings.max_n, "--max-n"),
        ("prompt", num_prompts, settings.max_prompts, "--max-prompts"),
        ("n", n * num_prompts, settings.max_streams, "--max-streams"),
    ):
        if number > most:
            raise invalid(
                name,
                f"{name}: {number} answers or prompts in one request, this gateway takes {most} ({flag}): send several requests",
            )


async def to_the_end(events: AsyncIterator[bytes], prompt_field: str) -> AsyncGenerator[bytes, None]:
    """Yield the events, then [DONE] or, after an error, an event that says so."""
    last = DONE
    try:
        async for event in events:
            yield event
    except KvpoolError as error:
        last = b"event: error\n" + data(openai_error(error, prompt_field).body)
    except Exception:
        log.exception("stream failed")
        last = b'event: error\ndata: {"error":{"message":"the gateway failed, which is a defect; its log has the ' + (
            b'traceback","type":"server_error","param":null,"code":"internal_error"}}\n\n'
        )
    yield last


def data(message: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
