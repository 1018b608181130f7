"""Serves POST /api/drain: a worker takes no new requests, ends the running ones and leaves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError

from ..context import gateway_of
from ..errors import api_error
from ..openai.bodies import read_body


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    worker_id: str = Field(min_length=1, max_length=1024)
    grace: float | None = Field(default=None, ge=0, le=3600, allow_inf_nan=False)


async def drain(request: Request) -> Response:
    """Drain the worker of the body {"worker_id", "grace"?: seconds for running requests, by default the worker's own setting}. May
    be repeated."""
    body = await read_body(request, _Body)
    try:
        session = await gateway_of(request).client.drain(body.worker_id, grace=body.grace)
    except KvpoolError as error:
        raise api_error(error) from error
    return JSONResponse({"session": str(session)})
