"""Shorter pauses for the tests of the client: what it waits for is there or will never be."""

from __future__ import annotations

import pytest

from kvpool.client import stream
from kvpool.client.cli import terminal


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a stream asks the manager or the workers again."""
    monkeypatch.setattr(stream, "_NO_WORKER_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(stream, "_NEXT_ROUND_PAUSE_SECONDS", 0.02)


@pytest.fixture
def no_manager_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command waits for its manager no longer than it takes to be refused by the port."""
    monkeypatch.setattr(terminal, "_FIRST_CONTACT_SECONDS", 0.1)
