"""Serves POST /api/explain: why a prompt is not served from the cache."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvpool.client import KvpoolError

from ..context import gateway_of
from ..openai.bodies import Body, Messages, plain, read_body
from ..openai.errors import openai_error

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(fail_fast=True)]
MAX_SALT_CHARACTERS: Final = 256


class ExplainBody(Body):
    """A prompt, as text or token ids, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_SALT_CHARACTERS)


async def explain(request: Request) -> JSONResponse:
    """Answer with the explanation and, as `sentences`, the same in words. Raises ApiError."""
    body = await read_body(request, ExplainBody)
    client = gateway_of(request).client
    messages = None if body.messages is None else plain(body.messages)
    try:
        explanation = await client.explain(
            body.prompt, messages=messages, model=body.model, tenant_salt=body.cache_salt or ""
        )
        served = await client.model(explanation.model_fingerprint)
    except KvpoolError as error:
        raise openai_error(error, "prompt" if messages is None else "messages") from error
    return JSONResponse(explanation.as_object() | {"sentences": explanation.sentences(served.tokenizer)})
