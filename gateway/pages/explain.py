"""POST /api/explain: why a prompt is not served from the cache."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse

from kvpool.client import InvalidRequest, KvpoolError, NotFound, Unavailable

from ..context import gateway_of

MAX_BODY_BYTES: Final = 8 << 20
"""Of a prompt of a million tokens as JSON, or of its text."""

TokenIds = list[Annotated[int, Field(ge=0, lt=1 << 32)]]


class ExplainBody(BaseModel):
    """A prompt, as text or token ids, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | TokenIds | None = None
    messages: list[dict[str, Any]] | None = None
    cache_salt: str | None = Field(default=None, max_length=256)


async def explain(request: Request) -> JSONResponse:
    """The explanation and, as `sentences`, the same in words. 400 for a body that is not as needed, 413 for one that is too large,
    404 for an unknown model, 503 without a manager or worker."""
    body = await _body_of(request)
    if body is None:
        return _refused(413, f"at most {MAX_BODY_BYTES} bytes are taken: send a shorter prompt")
    try:
        wanted = ExplainBody.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return _refused(400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
    client = gateway_of(request).client
    try:
        found = await client.explain(
            wanted.prompt, messages=wanted.messages, model=wanted.model, tenant_salt=wanted.cache_salt or ""
        )
        served = await client.model(found.model_fingerprint)
    except KvpoolError as error:
        return _refused(_status_of(error), str(error))
    return JSONResponse(found.as_object() | {"sentences": found.sentences(served.tokenizer)})


async def _body_of(request: Request) -> bytes | None:
    """The body; None as soon as it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _status_of(error: KvpoolError) -> int:
    if isinstance(error, InvalidRequest):
        return 400
    if isinstance(error, NotFound):
        return 404
    return 503 if isinstance(error, Unavailable) else 502


def _refused(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
