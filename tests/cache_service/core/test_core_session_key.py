"""A session without a key. What one with a key refuses: edge/test_edge_strangers.py."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Uplink
from kvpool.cache_service.core.refusal import Reason, Refusal
from kvpool.cache_service.core.session_key import SessionKey
from tests.cache_service.core.lockstep import registration


def test_a_session_without_a_key_takes_none() -> None:
    """Of a caller in the same process; one that states a key means another session."""
    manager = CacheManager(1)
    session = manager.register(registration(), 0.0).session
    with pytest.raises(Refusal) as caught:
        manager.allocate(Uplink(session, 1, key=SessionKey(range(16))), [])
    assert caught.value.reason is Reason.WRONG_KEY
    manager.allocate(Uplink(session, 1), [])
