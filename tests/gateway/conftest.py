"""One cluster of a tiny model for all tests of answers, and a gateway before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from kvpool.gateway.server import GatewayServer
from tests.cluster.in_process import InProcessCluster, in_process_cluster
from tests.cluster.models import make_endless_model
from tests.gateway.serving import serving


@dataclass(frozen=True)
class Front:
    """A cluster, the gateway before it, and OpenAI's own client."""

    cluster: InProcessCluster
    gateway: GatewayServer
    openai: AsyncOpenAI
    model: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """Shared by a module's tests, which leave nothing held."""
    folder = tmp_path_factory.mktemp("front")
    make_chat_model(folder / "model")
    async with in_process_cluster(folder / "model", folder, num_blocks=1025, max_num_seqs=64) as cluster:
        address = f"127.0.0.1:{cluster.manager.port}"
        async with (
            serving(address) as gateway,
            AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as openai,
        ):
            (model,) = (await openai.models.list()).data
            yield Front(cluster, gateway, openai, model.id)


@pytest.fixture(scope="module")
def front_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster and a gateway in a thread of their own, for tests that are no coroutines."""
    folder = tmp_path_factory.mktemp("front")
    make_chat_model(folder / "model")
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()

    async def serve(stopping: asyncio.Event) -> None:
        async with (
            in_process_cluster(folder / "model", folder, num_blocks=1025, max_num_seqs=64) as cluster,
            serving(f"127.0.0.1:{cluster.manager.port}") as gateway,
        ):
            ready.set_result(gateway.url)
            await stopping.wait()

    stopping = asyncio.Event()
    thread = Thread(target=lambda: loop.run_until_complete(serve(stopping)))
    thread.start()
    yield ready.result(timeout=60)
    loop.call_soon_threadsafe(stopping.set)
    thread.join()
    loop.close()


def make_chat_model(folder: Path) -> None:
    """A tiny model for long texts, of one token per character, with a chat template."""
    make_endless_model(folder, tokenizer=True)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "chat_template.jinja").write_text(template)
