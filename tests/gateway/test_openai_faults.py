"""Workers that die in the middle of an answer: the reader over HTTP gets the undisturbed text, and never notices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from kvpool.client import ClientConfig
from kvpool.gateway import app
from tests.cluster.cluster import MANAGER, WORKERS, TwoWorkers
from tests.gateway.serving import http_client, serving
from tests.until import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = [14, *range(10)]
NUM_TOKENS = 150
NUM_BEFORE = 10


class Served(TwoWorkers):
    openai: AsyncOpenAI
    url: str
    expected: list[int]

    async def stream(self, interrupt: Callable[[], Awaitable[None]]) -> list[int]:
        """The ids of one answer, which is interrupted after the first ones."""
        ids: list[int] = []
        answer: Any = await self.openai.completions.create(
            model="", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True,
            extra_body={"model": None, "ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        async for chunk in answer:
            is_before = len(ids) < NUM_BEFORE
            ids += chunk.choices[0].to_dict()["token_ids"]
            if is_before and len(ids) >= NUM_BEFORE:
                await interrupt()
        return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Its gateway waits half a second for a worker when there is none, not five."""
    folder = tmp_path_factory.mktemp("faults")
    async with Served(folder, lease_seconds=1.0, tokenizer=True) as served, AsyncExitStack() as served_by:
        await served.start_both(num_blocks=257, step_seconds=0.005)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "ClientConfig", partial(ClientConfig, worker_wait=0.5))
            gateway = await served_by.enter_async_context(serving(served.address()))
        served.url = gateway.url
        async with served.client() as client:
            own = await client.generate(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True).collect()
            served.expected = list(own.token_ids)
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as served.openai:
            yield served


async def test_a_worker_that_is_killed_ends_no_answer(served: Served) -> None:
    killed = ""

    async def kill_its_holder() -> None:
        nonlocal killed
        async with served.client() as client:
            (killed,) = [worker.worker_id for worker in (await client.describe()).workers if worker.num_sequences]
        served.kill(killed)

    async with served.lent():
        assert await served.stream(kill_its_holder) == served.expected
        async with http_client(served.url) as client:
            *_, last = (await client.get("/api/requests")).json()["requests"]
    (other,) = set(WORKERS) - {killed}
    parts = [(part["state"], part["worker_id"]) for part in last["parts"]]
    assert parts[0] == ("waiting", "")
    assert ("decode", killed) in parts[: parts.index(("moving", other))]
    assert parts[-1] == ("decode", other)
    assert last["times"]["before_ms"] > 0


async def test_a_manager_that_is_killed_and_comes_back_ends_no_answer(served: Served) -> None:
    async def kill_the_manager() -> None:
        served.kill(MANAGER)
        await served.start_manager()

    async with served.lent():
        assert await served.stream(kill_the_manager) == served.expected


async def test_without_a_worker_requests_are_503_and_health_says_why(served: Served) -> None:
    async with served.lent(), http_client(served.url, timeout=60) as client:
        for name in WORKERS:
            served.kill(name)

        async def is_noticed() -> bool:
            return (await client.get("/health")).status_code == 503

        await eventually(is_noticed, "the workers' leases end")
        assert "worker" in (await client.get("/health")).json()["why"]
        refused = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        assert refused.status_code == 503, refused.text
