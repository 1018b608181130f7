"""For tests of the client: shorter pauses, since what it waits for is there or will never be; a process for templates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvpool.client import stream
from kvpool.client.template_process import TemplateProcess


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a stream asks the manager or the workers again."""
    monkeypatch.setattr(stream, "_NO_WORKER_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(stream, "_NEXT_ROUND_PAUSE_SECONDS", 0.02)


@pytest.fixture(scope="module")
def process() -> Iterator[TemplateProcess]:
    """A process that renders chat templates."""
    with closing(TemplateProcess()) as process:
        yield process
