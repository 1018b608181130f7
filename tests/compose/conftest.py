"""Tests against containers: only `make test-compose` runs them, because they need a Docker engine and images."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest
import pytest_asyncio

from scripts.compose.end_to_end import VARIABLE
from scripts.compose.project import compose_command, compose_environment
from tests.compose.containers import SERVICES, START_SECONDS, Containers

FOLDER = Path(__file__).parent
_num_left_out = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in this folder, unless `make test-compose` has prepared for it."""
    ours = [item for item in items if item.path.is_relative_to(FOLDER)]
    if not ours or VARIABLE in os.environ:
        return
    config.stash[_num_left_out] = len(ours)
    config.hook.pytest_deselected(items=ours)
    items[:] = [item for item in items if item not in ours]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was left out and why."""
    count = config.stash.get(_num_left_out, 0)
    if count:
        terminalreporter.write_line(f"{count} tests of containers were left out: `make test-compose` runs them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what runs and the end of its logs."""
    report = yield
    if report.failed:
        for title, arguments in (
            ("containers", ["ps", "--all"]),
            ("their logs", ["logs", "--tail", "60", "--no-color"]),
        ):
            done = subprocess.run(
                compose_command(*arguments),
                env=compose_environment(os.environ),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            report.sections.append((title, done.stdout))
    return report


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def containers() -> AsyncIterator[Containers]:
    """The cluster, started as a user starts it; the tests follow one another on it. What is left is removed."""
    cluster = Containers()
    try:
        await cluster.compose("up", "--detach", "--wait", "--wait-timeout", f"{START_SECONDS:.0f}", "--no-build")
        await cluster.until_serving(*SERVICES)
        yield cluster
    finally:
        await cluster.compose("down", "--volumes", "--timeout", "5")
