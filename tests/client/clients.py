"""Clients for tests, and streams that have begun."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvpool.client import Client, ClientConfig, GenerateStream
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
