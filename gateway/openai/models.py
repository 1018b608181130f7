"""Serves GET /v1/models: the models of the workers."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError
from kvpool.client.models import KnownModel, served_models

from ..context import Gateway, gateway_of
from ..errors import ApiError


async def list_models(request: Request) -> Response:
    """Answer with each model once, however many workers serve it."""
    return JSONResponse({"object": "list", "data": list((await _models(gateway_of(request))).values())})


async def show_model(request: Request) -> Response:
    """Answer with one model and the defaults that its files give requests. Raises ApiError."""
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
    entry = models[name]
    try:
        model = await gateway_of(request).client.model(entry["root"])
    except KvpoolError:
        return JSONResponse(entry)  # its workers have just left
    return JSONResponse(entry | {"default_options": model.default_options})


async def _models(gateway: Gateway) -> dict[str, dict[str, Any]]:
    described = await gateway.client.describe()
    models = sorted(served_models(described.workers), key=lambda model: (model.name, not model.takes_prompts))
    by_name: dict[str, dict[str, Any]] = {}
    for model in models:
        by_name.setdefault(model.name, _encode(model))
    return by_name


def _encode(model: KnownModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        # When its first worker began to serve it: an incarnation begins with the start time in nanoseconds.
        "created": min(worker.incarnation for worker in model.workers) // 10**9,
        "owned_by": "kvpool",
        "root": model.fingerprint,
        "parent": None,
        "max_model_len": model.max_model_len,
    }
