"""POST /api/explain over a real client, and a manager that answers what the test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kvpool.v1 import cache_pb2
from tests.client.fakes import FakeManager, FakeWorker, fake_cluster
from tests.gateway.serving import calling


@asynccontextmanager
async def page() -> AsyncIterator[tuple[FakeManager, httpx.AsyncClient]]:
    async with fake_cluster(FakeWorker("w")) as manager, calling(manager.address) as browser:
        manager.explanation = cache_pb2.ExplainResponse(num_workers=1)
        manager.explanation.workers.add(worker_id="w", miss=cache_pb2.Miss(cause=cache_pb2.MISS_CAUSE_NEVER_SEEN))
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


async def test_what_is_wrong_is_refused_with_a_message() -> None:
    wrong = (
        *(b"", b"[]", b"{", b"\xff", b"{}", b'{"prompt": [-1]}', b'{"prompt": [4000000]}', b'{"messages": [{}]}'),
        *(b'{"prompt": "a", "more": 1}', b'{"prompt": "a", "messages": []}', b'{"prompt": "the", "model": "huge"}'),
    )
    async with page() as (_, browser):
        for body in wrong:
            answer = await browser.post("/api/explain", content=body)
            assert answer.status_code == (404 if b"huge" in body else 400), body
            assert answer.json()["error"]["message"]
