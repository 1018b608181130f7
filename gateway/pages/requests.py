"""Serves GET /api/requests: the last answers of this gateway, or one of them with why its prompt was not cached."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..context import gateway_of
from ..errors import ApiError


async def requests(request: Request) -> Response:
    """Answer with one answer, for ?number=…, or with all kept ones, oldest first and without explanations."""
    log = gateway_of(request).request_log
    asked = request.query_params.get("number")
    if asked is None:
        return JSONResponse({"requests": [record.as_object() for record in log.changed_since(0)]})
    if not asked.isascii() or not asked.isdigit() or len(asked) > 15:
        raise ApiError(400, f"number is a number from 1, got {asked[:64]!r}", param="number")
    record = log.find(int(asked))
    if record is None:
        raise ApiError(404, f"answer {asked} is not kept; --kept-requests says how many are", code="not_found")
    return JSONResponse(record.as_object() | {"explanation": record.explanation})
