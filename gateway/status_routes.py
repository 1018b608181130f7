"""The gateway's own routes: its health, version and load, the workers that it serves, its metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvpool.client import KvpoolError
from kvpool.process.metrics import CONTENT_TYPE, MetricsPage
from kvpool.process.version import installed_version
from kvpool.v1 import cache_pb2

from .context import gateway_of

HEALTH_SECONDS: Final = 2.0
"""Time for the manager to answer. A probe of Kubernetes waits one second by default, Docker's thirty."""


def serves(worker: cache_pb2.WorkerDescription) -> bool:
    """Whether new requests may go to a worker."""
    return bool(worker.address) and not worker.draining and not worker.recovering


async def health(request: Request) -> Response:
    """Answer 200 if text can be generated now, else 503 with the reason."""
    try:
        described = await gateway_of(request).client.describe(timeout=HEALTH_SECONDS)
    except KvpoolError as error:
        return _unwell(f"the manager does not answer: {error.message}")
    num_serving = sum(map(serves, described.workers))
    if not num_serving:
        why = "no worker is registered" if not described.workers else "no worker takes requests now"
        return _unwell(f"{why}: start one, or read its log")
    return JSONResponse({"status": "ok", "workers": num_serving})


def _unwell(why: str) -> Response:
    return JSONResponse({"status": "unavailable", "why": why}, HTTPStatus.SERVICE_UNAVAILABLE)


async def version(request: Request) -> Response:
    """Answer with the version of the gateway."""
    return JSONResponse({"version": installed_version()})


async def load(request: Request) -> Response:
    """Answer with the number of answers that are being generated, under vLLM's name."""
    return JSONResponse({"server_load": gateway_of(request).metrics.open_streams})


async def server_info(request: Request) -> Response:
    """Answer with the workers and the limits of this gateway."""
    gateway = gateway_of(request)
    described = await gateway.client.describe()
    settings = gateway.settings
    limits = ("max_streams", "max_body_bytes", "max_n", "max_prompts", "timeout", "ignore_unknown_fields")
    return JSONResponse(
        {
            "version": installed_version(),
            "manager": {"address": settings.manager, "epoch": described.epoch},
            "limits": {name: getattr(settings, name) for name in limits},
            "workers": [_worker(worker) for worker in described.workers],
        }
    )


def _worker(worker: cache_pb2.WorkerDescription) -> dict[str, Any]:
    return {
        "worker_id": worker.worker_id,
        "model": worker.model_name,
        "model_fingerprint": worker.model_fingerprint,
        "max_model_len": worker.max_model_len,
        "block_size": worker.kv_cache_config.block_size,
        "num_blocks": [pool.num_blocks for pool in worker.kv_cache_config.pools],
        "num_running": worker.load.num_running,
        "num_waiting": worker.load.num_waiting,
        "serving": serves(worker),
    }


async def metrics(request: Request) -> Response:
    """Answer with the page of metrics for Prometheus."""
    gateway = gateway_of(request)
    page = MetricsPage()
    gateway.metrics.fill(page, gateway.limits, num_viewers=gateway.hub.num_viewers)
    # In a thread, because a long page takes milliseconds to write; it is complete by now.
    return Response(await run_in_threadpool(generate_latest, page), media_type=CONTENT_TYPE)
