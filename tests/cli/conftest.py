"""Shorter pauses for the tests of the command line, as for those of the client."""

from __future__ import annotations

import pytest

from kvpool.cli import terminal
from tests.client.conftest import short_pauses

__all__ = ["short_pauses"]


@pytest.fixture
def no_manager_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command waits for its manager no longer than it takes to be refused by the port."""
    monkeypatch.setattr(terminal, "_FIRST_CONTACT_SECONDS", 0.1)
