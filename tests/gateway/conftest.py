"""One cluster of a tiny model for all tests of answers, and a gateway before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from kvpool.gateway.server import GatewayServer
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.models import make_endless_model
from tests.gateway.serving import http_client, serving

EXTRA: Final = {"return_token_ids": True, "ignore_eos": True}
"""Fields of a body that OpenAI's client does not know."""


@dataclass(frozen=True)
class Front:
    """A cluster, the gateway before it, and two callers of it: OpenAI's own client and a plain one."""

    cluster: InProcessCluster
    gateway: GatewayServer
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    model: str

    async def complete(self, prompt: Any, *, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A completion by OpenAI's client, greedy unless the fields say otherwise. `extra`: fields that it does not know."""
        asked = {"model": self.model, "temperature": 0, "extra_body": EXTRA | (extra or {}), **fields}
        return await self.openai.completions.create(prompt=prompt, **asked)

    async def chat(self, messages: Any, **fields: Any) -> Any:
        """A chat in the same way."""
        asked = {"model": self.model, "temperature": 0, "extra_body": EXTRA, **fields}
        return await self.openai.chat.completions.create(messages=messages, **asked)


def ids_of(choice: Any) -> list[int]:
    """The tokens of an answer, or those that an event has of it."""
    ids: list[int] = choice.to_dict().get("token_ids", [])
    return ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """Shared by a module's tests, which leave nothing held. A tiny model for long texts, of one token per character."""
    folder = tmp_path_factory.mktemp("front")
    make_endless_model(folder / "model", tokenizer=True)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "model" / "chat_template.jinja").write_text(template)
    async with in_process_cluster(folder / "model", folder, num_blocks=1025, max_num_seqs=64) as cluster:
        address = f"127.0.0.1:{cluster.manager.port}"
        async with (
            serving(address) as gateway,
            http_client(gateway.url, timeout=60) as http,
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as openai,
        ):
            (model,) = (await openai.models.list()).data
            yield Front(cluster, gateway, openai, http, model.id)
