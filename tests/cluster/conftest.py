"""What all tests of the cluster share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.cluster.cluster import Cluster


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
