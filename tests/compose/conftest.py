"""Tests against containers: only `make test SUITE=compose` runs them, because they need a Docker engine and images."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.compose.containers import SERVICES, START_SECONDS, Containers
from tests.compose.project import ROOT, compose_command, compose_environment, docker_problem, leftovers
from tests.left_out import leave_out

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in this folder, except for `make test SUITE=compose`."""
    if os.environ.get("TEST_SUITE") != "compose":
        ours = [item for item in items if item.path.is_relative_to(FOLDER)]
        leave_out(config, items, ours, "tests of containers were left out: `make test SUITE=compose` runs them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what runs and the end of its logs."""
    report = yield
    if report.failed:
        report.sections.append(("containers", _compose("ps", "--all").stdout))
        report.sections.append(("their logs", _compose("logs", "--tail", "60", "--no-color").stdout))
    return report


@pytest.fixture(scope="session")
def images() -> Iterator[None]:
    """Builds the images. At the end no container, volume, network or image of the project is left."""
    if (problem := docker_problem()) is not None:
        pytest.exit(f"make test SUITE=compose: {problem}", returncode=1)
    # As Ctrl-C: the fixtures remove what they made. `timeout` sends it, for example.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _remove()  # of a run that was killed
    try:
        if _compose("build", "manager", "gateway", "worker-0", captured=False).returncode != 0:
            pytest.exit("make test SUITE=compose: the images could not be built; see above", returncode=1)
        yield
    finally:
        _remove()
    assert leftovers("container", "volume", "network", "image") == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def containers(images: None) -> Containers:
    """The cluster, started as a user starts it; the tests follow one another on it."""
    cluster = Containers()
    await cluster.compose("up", "--detach", "--wait", "--wait-timeout", f"{START_SECONDS:.0f}", "--no-build")
    await cluster.until_serving(*SERVICES)
    return cluster


def _compose(*arguments: str, captured: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `docker compose …` to its end, whatever its status; `captured`: stdout and stderr together in `stdout`."""
    output = subprocess.PIPE if captured else None
    return subprocess.run(
        compose_command(*arguments),
        env=compose_environment(os.environ),
        stdout=output,
        stderr=subprocess.STDOUT if captured else None,
        cwd=ROOT,
        text=True,
        check=False,
    )


def _remove() -> None:
    """Remove all of the project. The engine's build cache stays, so that the next build is quick."""
    _compose("--profile", "client", "down", "--volumes", "--remove-orphans", "--rmi", "all", "--timeout", "5")
