"""Prefix tests hold whatever the hash function does: it names blocks and decides nothing."""

from __future__ import annotations

import pytest

from tests.cache_service.core.lockstep import HASH_FUNCTIONS, Lockstep


@pytest.fixture(params=list(HASH_FUNCTIONS))
def every_hash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test under xxh64, its low 8 bits, and a constant."""
    name = str(request.param)
    monkeypatch.setattr(Lockstep, "default_hash", staticmethod(HASH_FUNCTIONS[name]))
    return name
