"""What all tests of the cluster share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator

import pytest
import pytest_asyncio

from tests.cluster.cluster import Cluster
from tests.cluster.tiny_cluster import TinyCluster, start_tiny_cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows the end of the logs of the services that were running."""
    report = yield
    if report.failed:
        for cluster in Cluster.living:
            for process in cluster.processes.values():
                report.sections.append((f"log of {process!r}", process.log[-4000:]))
    return report


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinyCluster]:
    """Shared by all tests that do it no harm."""
    async with start_tiny_cluster(tmp_path_factory.mktemp("tiny")) as cluster:
        yield cluster
