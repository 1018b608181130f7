"""Routers of other projects in front of two gateways."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
import pytest_asyncio

from tests.clients.driving import assert_are_kvpools_own, refusal
from tests.clients.environments import program
from tests.clients.served import GATEWAYS, MAX_TOKENS, MODEL, Served, messages_about, text_about
from tests.clients.table import ROUTERS, chosen
from tests.cluster.cluster import HOST, free_port
from tests.cluster.process import EXECUTE, Process
from tests.until import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SUBJECTS: Final = ("Rivers", "Bridges", "Deserts", "Islands", "Markets", "Bakeries", "Theatres", "Meadows")
_START_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Router:
    name: str
    served: Served
    openai: openai.AsyncOpenAI

    async def chat(self, subject: str) -> tuple[Any, ...]:
        whole = await self.openai.chat.completions.create(**_asked(subject))
        return _answer(whole.choices[0].message.content or "", whole.usage)

    async def chat_streamed(self, subject: str) -> tuple[Any, ...]:
        text, usage = "", None
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.openai.chat.completions.create(**_asked(subject), **options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return _answer(text, usage)

    async def text(self, subject: str) -> tuple[Any, ...]:
        whole = await self.openai.completions.create(
            model=MODEL, prompt=text_about(subject), temperature=0, max_tokens=MAX_TOKENS
        )
        return _answer(whole.choices[0].text, whole.usage)

    def about(self, subject: str) -> str:
        """Not what another router was asked. The difference comes first: routers send common beginnings to one gateway."""
        return f"{subject} ({self.name})"

    async def check_chats(self) -> None:
        for subject in map(self.about, SUBJECTS):
            assert (await self.chat(subject))[0] == (await self.served.own_chat(messages_about(subject))).text


@asynccontextmanager
async def routing(name: str, command: Sequence[str], served: Served, folder: Path) -> AsyncIterator[Router]:
    """Run a client's program with these arguments and those that all routers have, until it routes to both gateways."""
    port = free_port()
    arguments = [
        *("--host", HOST, "--port", str(port)),
        *("--prometheus-host", HOST, "--prometheus-port", str(free_port())),
        *("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1"),
        *("--worker-urls", *map(served.url, GATEWAYS)),
    ]
    path = str(program(name, command[0]))
    process = Process(name, ["-c", EXECUTE, path, *command[1:], *arguments], folder / f"{name}.log", {})
    url = f"http://{HOST}:{port}"
    try:
        async with httpx.AsyncClient(base_url=url) as http:

            async def routes() -> bool:
                assert process.status is None, f"{process} has ended:\n{process.log}"
                try:
                    answer = await http.get("/workers")
                except httpx.TransportError:
                    return False
                healthy = {worker["url"] for worker in answer.json()["workers"] if worker["is_healthy"]}
                return healthy == set(map(served.url, GATEWAYS))

            await eventually(routes, f"{name} routes", _START_SECONDS)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            yield Router(name, served, client)
    finally:
        await asyncio.to_thread(process.kill)


def _asked(subject: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages_about(subject), "temperature": 0, "max_tokens": MAX_TOKENS}


def _answer(text: str, usage: Any) -> tuple[Any, ...]:
    return text, usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=chosen(ROUTERS))
async def router(
    request: pytest.FixtureRequest, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Router]:
    name = request.param
    async with routing(name, ROUTERS[name], served, tmp_path_factory.mktemp(name)) as router:
        yield router


async def test_chats_and_texts_are_kvpools_own_streamed_or_not(router: Router) -> None:
    subject = router.about(SUBJECTS[0])
    chats = [await router.chat(subject), await router.chat_streamed(subject)]
    assert_are_kvpools_own(await router.served.own_chat(messages_about(subject)), chats)
    texts = [await router.text(subject), await router.text(subject)]
    assert_are_kvpools_own(await router.served.own_text(text_about(subject)), texts)


async def test_what_kvpool_cannot_do_is_refused_in_our_words(router: Router) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(refusal("response_format"))):
        await router.openai.chat.completions.create(**_asked(SUBJECTS[0]), response_format={"type": "json_object"})


async def test_both_gateways_are_used(router: Router) -> None:
    before = [await router.served.chats_of(name) for name in GATEWAYS]
    await router.check_chats()
    more = [await router.served.chats_of(name) - count for name, count in zip(GATEWAYS, before, strict=True)]
    assert sum(more) == len(SUBJECTS), more
    assert min(more) > 0, more


async def test_a_gateway_that_is_killed_loses_no_chat_and_is_used_again(router: Router) -> None:
    router.served.cluster.kill(GATEWAYS[1])
    await router.check_chats()
    await router.served.cluster.start_gateway(GATEWAYS[1])

    async def used_again() -> bool:
        before = await router.served.chats_of(GATEWAYS[1])
        for subject in SUBJECTS:
            await router.chat(router.about(subject))
        return await router.served.chats_of(GATEWAYS[1]) > before

    await eventually(used_again, f"{router.name} uses the gateway that is back", _START_SECONDS)
