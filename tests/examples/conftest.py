"""For tests of examples of engines: a manager, and the program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.process import Process
from tests.examples.engines import Example, Start


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A manager in a process of its own, and no worker; no lease runs out in a test."""
    async with Cluster(tmp_path, lease_seconds=600, keep_alive_seconds=0.1) as cluster:
        await cluster.start_manager()
        yield cluster


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts an example with a manager's address and flags. Killed at the end if it still runs."""
    started: list[Process] = []

    def start(example: Example, manager: str, **settings: int) -> Process:
        name = f"engine-{len(started)}"
        flags = [f"--{flag.replace('_', '-')}={value}" for flag, value in settings.items()]
        started.append(Process(name, [*example.program, "--manager", manager, *flags], tmp_path / f"{name}.log", {}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
