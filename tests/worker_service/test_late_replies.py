"""What comes late is of the past: replies to calls that were given up, and to heartbeats of an earlier session."""

from __future__ import annotations

from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.state import CacheSettings


def _cache(session: int = 1) -> EngineCache:
    """With an open session that has nothing to report."""
    cache = EngineCache(CacheSettings(block_size=4, num_blocks=8))
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=session))
    return cache


def _grant_of(block: int) -> cache_pb2.Downlink:
    downlink = cache_pb2.Downlink()
    entry = downlink.entries.add(number=1)
    entry.grant.block_ids.append(block)
    entry.grant.generations.append(7)
    return downlink


def test_a_heartbeats_reply_is_for_its_own_session_only() -> None:
    """The grants of a session that is over are nobody's: the manager has its blocks back."""
    cache = _cache(session=1)
    cache.lose("the lease ran out")
    cache.on_registered(cache_pb2.RegisterResponse(epoch=1, session=2))
    cache.on_keep_alive(1, cache_pb2.KeepAliveResponse(downlink=_grant_of(3)))
    assert cache.num_spare_blocks == 0
    cache.on_keep_alive(2, cache_pb2.KeepAliveResponse(downlink=_grant_of(3)))
    assert cache.num_spare_blocks == 1


def test_the_reply_to_a_call_that_was_given_up_is_dropped_whole() -> None:
    """Its state is on the way again under a larger number; grants and tables come with that reply."""
    cache = _cache()
    sequence = CacheSequence("s", 1, common_pb2.Root(model_fingerprint="m"), [1, 2], max_new_tokens=1)
    call = cache.next_call(lambda: [sequence], 0.0)
    assert call is not None
    cache.on_failure(call, "", 0.0)
    late = cache_pb2.AllocateResponse(downlink=_grant_of(3))
    late.results.add().granted.tables.add(block_ids=[1], generations=[7])
    cache.on_reply(call, late, 0.0)
    assert sequence.state is SequenceState.WAITING
    assert (sequence.table, cache.num_spare_blocks) == ([], 0)
    again = cache.next_call(lambda: [sequence], 1.0)
    assert again is not None
    cache.on_reply(again, late, 1.0)
    assert (sequence.table, cache.num_spare_blocks) == ([1], 1)
