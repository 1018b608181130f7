"""Clients of OpenAI's API before a real cluster: only `make test SUITE=clients` runs these tests, because each client needs its own
environment."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.clients.served import Served, served_cluster
from tests.clients.table import CLIENTS, ROUTERS, VARIABLE

# Without an environment there is nothing to collect; a file without a chosen client would look like tests that were skipped.
collect_ignore = [
    file
    for file, names in {
        "test_openai_clients.py": CLIENTS.keys(),
        "test_routers.py": ROUTERS.keys(),
        "test_lm_eval.py": {"lm-eval"},
    }.items()
    if not names & set(os.environ.get(VARIABLE, "").split())
]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """SmolLM2 behind two gateways, shared by all tests; in the end nothing is held, and every law holds."""
    async with served_cluster(tmp_path_factory.mktemp("clients")) as served:
        yield served
        await served.cluster.until_clean()
