"""Clients for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from client import Client, ClientConfig
from tests.client.fakes import FakeManager


def quick(manager: FakeManager, **settings: Any) -> Client:
    """A client that does not wait long for what will not come."""
    config = ClientConfig(manager=manager.address, first_contact=0.3, worker_wait=0.3, liveness_interval=0.1)
    return Client(config=replace(config, **settings))
