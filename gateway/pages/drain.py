"""POST /api/drain: a worker takes no new requests, ends the running ones and leaves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError

from ..context import gateway_of
from ..errors import ApiError, api_error


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    worker_id: str = Field(min_length=1, max_length=1024)
    grace: float | None = Field(default=None, ge=0, le=3600, allow_inf_nan=False)


async def drain(request: Request) -> Response:
    """{"worker_id", "grace"?: seconds for running requests; default: the worker's own setting}. May be repeated."""
    try:
        body = _Body.model_validate_json(await request.body())
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        param = ".".join(map(str, first["loc"])) or None
        raise ApiError(400, f"{param or 'the body'}: {first['msg']}", param=param) from error
    try:
        session = await gateway_of(request).client.drain(body.worker_id, grace=body.grace)
    except KvpoolError as error:
        raise api_error(error) from error
    return JSONResponse({"session": str(session)})
