"""Serves GET /api/requests: the last answers of this gateway, or one of them with why its prompt was not cached."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..context import gateway_of
from ..errors import ApiError
from .query import query_number


async def requests(request: Request) -> Response:
    """Answer with one answer, for ?number=…, or with all kept ones, oldest first and without explanations."""
    log = gateway_of(request).request_log
    if "number" not in request.query_params:
        return JSONResponse({"requests": [record.as_object() for record in log.changed_since(0)]})
    number = query_number(request, "number", None, least=1, most=10**15 - 1)
    record = log.find(number)
    if record is None:
        raise ApiError(404, f"answer {number} is not kept; --kept-requests says how many are", code="not_found")
    return JSONResponse(record.as_object() | {"explanation": record.explanation})
