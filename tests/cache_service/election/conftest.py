"""The tests of leases run in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.cache_service.election.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    return (
        {"virtual": VirtualLoop} if item.path.name == "test_kubernetes_lease.py" else {"real": asyncio.new_event_loop}
    )
