"""Shorter pauses for the tests of the client: what it waits for is there or will never be."""

from __future__ import annotations

import pytest

from kvpool.client import stream


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a stream asks the manager or the workers again."""
    monkeypatch.setattr(stream, "_NO_WORKER_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(stream, "_NEXT_ROUND_PAUSE_SECONDS", 0.02)
