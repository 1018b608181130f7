"""GET /v1/models: what the workers serve."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from kvpool.client import KvpoolError
from kvpool.v1 import cache_pb2

from ..context import Gateway, gateway_of
from ..errors import ApiError, api_error


def model_routes() -> list[BaseRoute]:
    """The list, and one of it."""
    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", show_model, methods=["GET"]),
    ]


async def list_models(request: Request) -> Response:
    """Each model once, however many workers serve it."""
    return JSONResponse({"object": "list", "data": list((await _models(gateway_of(request))).values())})


async def show_model(request: Request) -> Response:
    """One model, with what its files make the default of requests. Raises ApiError."""
    name = request.path_params["name"]
    models = await _models(gateway_of(request))
    if name not in models:
        served = ", ".join(models) or "none"
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"no live worker serves the model {name[:128]!r}; served are {served}",
            param="model",
            code="model_not_found",
        )
    found = models[name]
    try:
        model = await gateway_of(request).client.model(found["root"])
    except KvpoolError:
        return JSONResponse(found)  # its workers have just left
    return JSONResponse(found | {"default_options": model.default_options})


async def _models(gateway: Gateway) -> dict[str, dict[str, Any]]:
    try:
        described = await gateway.client.describe()
    except KvpoolError as error:
        raise api_error(error) from error
    serving = sorted((worker for worker in described.workers if worker.address), key=lambda worker: worker.model_name)
    models: dict[str, dict[str, Any]] = {}
    for worker in serving:
        known = models.setdefault(worker.model_name, _encode(worker))
        known["max_model_len"] = min(known["max_model_len"], worker.max_model_len)
    return models


def _encode(worker: cache_pb2.WorkerDescription) -> dict[str, Any]:
    return {
        "id": worker.model_name,
        "object": "model",
        # When its first worker began to serve it: an incarnation begins with the start time in nanoseconds.
        "created": worker.incarnation // 10**9,
        "owned_by": "kvpool",
        "root": worker.model_fingerprint,
        "parent": None,
        "max_model_len": worker.max_model_len,
    }
