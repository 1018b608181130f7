"""POST /api/explain over a real client, and a manager that answers what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from kvpool.gateway.access import AccessKeys
from kvpool.gateway.app import connection_limits
from kvpool.gateway.context import Gateway
from kvpool.gateway.errors import ApiError, on_error
from kvpool.gateway.metrics import GatewayMetrics
from kvpool.gateway.pages.hub import Hub
from kvpool.gateway.pages.prefix_follower import Prefixes
from kvpool.gateway.request_log import RequestLog
from kvpool.gateway.routes import all_routes
from kvpool.gateway.settings import GatewaySettings
from kvpool.v1 import cache_pb2
from tests.client.clients import quick
from tests.client.fakes import FakeManager, FakeWorker, fake_cluster


@asynccontextmanager
async def page() -> AsyncIterator[tuple[FakeManager, httpx.AsyncClient]]:
    """The page's routes in front of a cluster of one worker."""
    async with fake_cluster(FakeWorker("w")) as manager, quick(manager) as client:
        manager.explanation = cache_pb2.ExplainResponse(num_workers=1)
        manager.explanation.workers.add(worker_id="w", miss=cache_pb2.Miss(cause=cache_pb2.MISS_CAUSE_NEVER_SEEN))
        app = Starlette(routes=all_routes(AccessKeys(())), exception_handlers={ApiError: on_error})
        settings = GatewaySettings()
        app.state.gateway = Gateway(
            settings,
            client,
            metrics=GatewayMetrics(),
            limits=connection_limits(settings),
            request_log=RequestLog(8, lambda: 0.0),
            hub=Hub(client.watch),
            prefixes=Prefixes(client.watch),
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as browser:
            yield manager, browser


async def test_a_prompt_is_explained_in_json_and_in_words() -> None:
    async with page() as (manager, browser):
        answer = await browser.post("/api/explain", json={"prompt": "the cat", "cache_salt": "s"})
        assert answer.status_code == 200
        found = answer.json()
        assert found["workers"][0]["miss"]["cause"] == "never_seen"
        assert found["sentences"] == [
            "w would serve 0 of 3 tokens from its cache: the block from token 0 on was never seen."
        ]
        assert "token_ids" not in found
        assert manager.explains[0].root.tenant_salt == "s"


@pytest.mark.parametrize("body", [{"prompt": [1, 5]}, {"messages": [{"role": "user", "content": "the"}]}])
async def test_token_ids_and_chats_are_taken(body: dict[str, Any]) -> None:
    async with page() as (_, browser):
        assert (await browser.post("/api/explain", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"\xff", 400),
        (b"{}", 400),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": [4000000]}', 400),
        (b'{"prompt": "a", "more": 1}', 400),
        (b'{"prompt": "a", "messages": []}', 400),
        (b'{"messages": [{}]}', 400),
        (b'{"prompt": "the", "model": "huge"}', 404),
    ],
)
async def test_what_is_wrong_is_refused_with_a_message(body: bytes, status: int) -> None:
    async with page() as (_, browser):
        answer = await browser.post("/api/explain", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
