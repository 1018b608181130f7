"""Clients for tests, and what is read from their streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvpool.client import Chunk, Client, ClientConfig, GenerateStream
from tests.client.fakes import FakeManager


def quick(manager: FakeManager, **settings: Any) -> Client:
    """A client that does not wait long for workers that will not come. The manager is there, however busy the machine is."""
    config = ClientConfig(manager=manager.address, first_contact=10.0, worker_wait=0.3, liveness_interval=0.1)
    return Client(config=replace(config, **settings))


async def begun(stream: GenerateStream, num_tokens: int = 1) -> GenerateStream:
    """The stream, once it has delivered that many tokens."""
    while num_tokens > 0:
        num_tokens -= len((await anext(stream)).token_ids)
    return stream


def joined(chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], str]:
    """All tokens and the text of an answer, whose tokens must follow on each other, and whose last chunk alone must end it."""
    tokens: list[int] = []
    for chunk in chunks:
        assert chunk.start_index == len(tokens)
        tokens += chunk.token_ids
    assert [chunk.finish_reason is not None for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    return tuple(tokens), "".join(chunk.text for chunk in chunks)
