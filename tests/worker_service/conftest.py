"""What several tests of a worker share."""

from __future__ import annotations

import pytest

from kvpool.worker_service.cache import engine_cache, link_state


@pytest.fixture
def brief_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was lost is sent again after a tenth of the usual time: where many are lost, waiting is all that takes long."""
    monkeypatch.setattr(link_state, "BACKOFF_FIRST_SECONDS", link_state.BACKOFF_FIRST_SECONDS / 10)
    for module in (link_state, engine_cache):
        monkeypatch.setattr(module, "BACKOFF_MOST_SECONDS", module.BACKOFF_MOST_SECONDS / 10)
