"""Errors in OpenAI's form, and the table from the client's errors to HTTP statuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    KvpoolError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)

_STATUSES: Final[Mapping[type[KvpoolError], HTTPStatus]] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    PermissionDenied: HTTPStatus.FORBIDDEN,
    NotFound: HTTPStatus.NOT_FOUND,
    AlreadyExists: HTTPStatus.CONFLICT,
    FailedPrecondition: HTTPStatus.CONFLICT,
    ResourceExhausted: HTTPStatus.TOO_MANY_REQUESTS,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    Cancelled: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}

_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request is answered with an error: the status, and the fields of OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` names the wrong field; `code` is a word for programs."""
        super().__init__(message)
        self.status = int(status)
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, in OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Make the whole answer."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def invalid(param: str, message: str) -> ApiError:
    """Make the answer to a request whose field `param` has a value that it may not have."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code="invalid_value")


def api_error(error: KvpoolError, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the answer to a client's error, with Retry-After if the service named a time. `code` is the error's reason by
    default."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    # An error outside the table is a defect.
    status = _STATUSES.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(status, error.message, param=param, code=code or error.reason.lower() or None, headers=headers)


async def on_error(request: Request, error: Exception) -> Response:
    """Answer with an ApiError or a client's error; for an application's table of handlers."""
    if isinstance(error, KvpoolError):
        error = api_error(error)
    assert isinstance(error, ApiError)
    return error.response()
