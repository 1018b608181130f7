"""Clients of OpenAI's API before a real cluster: only `make test-clients` runs these tests, because each client needs its own
environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from tests.clients.environments import NAMES
from tests.clients.served import Served, served_cluster

VARIABLE: Final = "KVPOOL_TEST_CLIENTS"
"""Set by `make test-clients`."""

collect_ignore_glob = [] if VARIABLE in os.environ else [f"test_{name.replace('-', '_')}.py" for name in NAMES]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """SmolLM2 behind two gateways, shared by all tests; in the end nothing is held, and every law holds."""
    async with served_cluster(tmp_path_factory.mktemp("clients")) as served:
        yield served
        await served.cluster.until_clean()
