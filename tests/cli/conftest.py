"""Commands in the process of the tests, with shorter pauses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest

from kvpool.cli import terminal
from tests.client.commands import kvpool
from tests.client.conftest import short_pauses
from tests.client.fakes import FakeManager

__all__ = ["short_pauses"]


class Ran(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


Run = Callable[..., Awaitable[Ran]]
"""Runs a command in a thread next to the fakes' event loop, `on` the cluster of a manager if one is given."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    async def run(*arguments: str, on: FakeManager | str | None = None) -> Ran:
        address = on.address if isinstance(on, FakeManager) else on
        status = await kvpool(*arguments, *(("--manager", address) if address else ()))
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def no_manager_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command waits for its manager no longer than it takes to be refused by the port."""
    monkeypatch.setattr(terminal, "_FIRST_CONTACT_SECONDS", 0.1)
