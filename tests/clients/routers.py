"""A router of other projects in front of two gateways, and what must be true of each."""

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

from tests.clients.driving import assert_are_kvpools_own, refusal
from tests.clients.environments import program
from tests.clients.served import GATEWAYS, MAX_TOKENS, MODEL, Served, messages_about, text_about
from tests.cluster.cluster import HOST, free_port
from tests.cluster.polling import eventually
from tests.cluster.process import Process

SUBJECTS: Final = ("Rivers", "Bridges", "Deserts", "Islands", "Markets", "Bakeries", "Theatres", "Meadows")
_EXECUTE: Final = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
_START_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Router:
    """One that runs."""

    name: str
    served: Served
    openai: openai.AsyncOpenAI

    async def chat(self, subject: str) -> dict[str, Any]:
        """A whole answer."""
        whole = await self.openai.chat.completions.create(**_asked(subject))
        return _answer(whole.choices[0].message.content or "", whole.usage)

    async def chat_streamed(self, subject: str) -> dict[str, Any]:
        """A streamed answer."""
        text, usage = "", None
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await self.openai.chat.completions.create(**_asked(subject), **options):
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
        return _answer(text, usage)

    async def text(self, subject: str) -> dict[str, Any]:
        """A text that is continued."""
        whole = await self.openai.completions.create(
            model=MODEL, prompt=text_about(subject), temperature=0, max_tokens=MAX_TOKENS
        )
        return _answer(whole.choices[0].text, whole.usage)

    async def answers(self) -> None:
        """Chats, streamed or not, and texts are kvpool's own, and what the cache served is reported."""
        subject = self._about(SUBJECTS[0])
        chats = [await self.chat(subject), await self.chat_streamed(subject)]
        assert_are_kvpools_own(await self.served.own_chat(messages_about(subject)), chats)
        texts = [await self.text(subject), await self.text(subject)]
        assert_are_kvpools_own(await self.served.own_text(text_about(subject)), texts)

    async def refuses(self) -> None:
        """What kvpool cannot do is refused with the gateway's status and words, not tried on another gateway."""
        with pytest.raises(openai.BadRequestError, match=re.escape(refusal("response_format"))):
            await self.openai.chat.completions.create(**_asked(SUBJECTS[0]), response_format={"type": "json_object"})

    async def uses_both(self) -> None:
        """Chats of different subjects come to both gateways, and each is kvpool's own."""
        before = {name: await self.served.chats_of(name) for name in GATEWAYS}
        for subject in SUBJECTS:
            assert (await self.chat(self._about(subject)))["text"] == await self._own(subject)
        after = {name: await self.served.chats_of(name) for name in GATEWAYS}
        more = {name: after[name] - before[name] for name in GATEWAYS}
        assert sum(more.values()) == len(SUBJECTS), more
        assert min(more.values()) > 0, more

    async def goes_on_without_one(self) -> None:
        """All chats are answered, also right after a gateway was killed; one that is back is used again."""
        cluster = self.served.cluster
        cluster.kill(GATEWAYS[1])
        for subject in SUBJECTS:
            assert (await self.chat(self._about(subject)))["text"] == await self._own(subject)
        await cluster.start_gateway(GATEWAYS[1])

        async def used_again() -> bool:
            before = await self.served.chats_of(GATEWAYS[1])
            for subject in SUBJECTS:
                await self.chat(self._about(subject))
            return await self.served.chats_of(GATEWAYS[1]) > before

        await eventually(used_again, f"{self.name} uses the gateway that is back", _START_SECONDS)

    def _about(self, subject: str) -> str:
        """Not what another router was asked. The difference comes first: routers send common beginnings to one gateway."""
        return f"{subject} ({self.name})"

    async def _own(self, subject: str) -> str:
        return (await self.served.own_chat(messages_about(self._about(subject)))).text


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
    process = Process(name, ["-c", _EXECUTE, path, *command[1:], *arguments], folder / f"{name}.log", {})
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


def _answer(text: str, usage: Any) -> dict[str, Any]:
    return {
        "text": text,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
    }
