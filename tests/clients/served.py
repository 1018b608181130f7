"""A real model behind a manager, a worker and two gateways, each a process, and kvpool's own answers to compare with."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from kvpool.client import Client, GenerateStream, Usage
from tests.cluster.cluster import Cluster

MODEL: Final = "smollm2"
GATEWAYS: Final = ("gateway-0", "gateway-1")
MAX_TOKENS: Final = 24
_SYSTEM: Final = (
    "{subject} is what this talk is about. You are a helpful assistant who answers briefly and never makes anything up."
)
_QUESTION: Final = "{subject}: say two sentences about it."
_TEXT: Final = "{subject}: what everybody should know about it, in the words of a patient teacher.\n\nFirst of all,"


class OwnAnswer(NamedTuple):
    """What kvpool's own client gets."""

    text: str
    usage: Usage
    """It counts the id that ended the text as well, as OpenAI's does."""


@dataclass
class Served:
    """Shared by all tests of clients."""

    cluster: Cluster
    client: Client

    def url(self, gateway: str = GATEWAYS[0]) -> str:
        """Where a gateway is, without /v1."""
        return f"http://{self.cluster.address(gateway)}"

    async def own_chat(self, messages: Any) -> OwnAnswer:
        return await _read(self.client.chat(messages, max_tokens=MAX_TOKENS))

    async def own_text(self, prompt: str) -> OwnAnswer:
        return await _read(self.client.generate(prompt, max_tokens=MAX_TOKENS))

    async def chats_of(self, gateway: str) -> float:
        """How many chats a gateway has answered with 200, by its own count."""
        async with httpx.AsyncClient(base_url=self.url(gateway)) as http:
            text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith("kvpool_gateway_requests_total{")]
        return sum(float(line.split()[-1]) for line in lines if "chat/completions" in line and '"200"' in line)


async def _read(stream: GenerateStream) -> OwnAnswer:
    text, usage = "", None
    async for chunk in stream:
        text += chunk.text
        usage = chunk.usage or usage
    assert usage is not None
    return OwnAnswer(text, usage)


def messages_about(subject: str) -> list[dict[str, str]]:
    """A chat that begins with its subject: what other tests have left in the cache is no prefix of it."""
    system, question = (text.format(subject=subject) for text in (_SYSTEM, _QUESTION))
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def text_about(subject: str) -> str:
    """A prompt that begins with its subject."""
    return _TEXT.format(subject=subject)


@asynccontextmanager
async def served_cluster(folder: Path) -> AsyncIterator[Served]:
    """Start all of it; logs are in `folder`."""
    async with Cluster(folder) as cluster:
        settings = {"model": MODEL, "num_blocks": 800, "max_num_batched_tokens": 512, "threads": os.cpu_count() or 1}
        await cluster.start({"worker": settings})
        async with cluster.client() as client:
            for name in GATEWAYS:
                await cluster.start_gateway(name)
            yield Served(cluster, client)
