"""Those who wait for a prefix in flight: when they ask again, and when they compute it themselves."""

from __future__ import annotations

import pytest

from kvpool.v1 import cache_pb2, common_pb2
from kvpool.worker_service.cache import parking
from kvpool.worker_service.cache.engine_cache import Computed, EngineCache
from kvpool.worker_service.cache.groups.dense import DenseGroup
from kvpool.worker_service.cache.sequence import CacheSequence, SequenceState
from kvpool.worker_service.cache.settings import CacheSettings
from kvpool.worker_service.cache.state import CacheState

_PATIENCE = 5.0


def _sequence(name: str) -> CacheSequence:
    return CacheSequence(name, 1, common_pb2.Root(model_fingerprint="m"), list(range(64)), max_new_tokens=1)


@pytest.fixture
def state() -> CacheState:
    return CacheState(CacheSettings(groups=(DenseGroup(8),), prefix_wait_seconds=_PATIENCE))


@pytest.fixture
def leader(state: CacheState) -> CacheSequence:
    """Lives, and has computed nothing yet."""
    leader = _sequence("leader")
    leader.state = SequenceState.LIVE
    state.sequences[leader.id] = leader
    return leader


@pytest.fixture
def waiter(state: CacheState, leader: CacheSequence) -> CacheSequence:
    """Waits since second 0 for the leader's first 32 tokens."""
    waiter = _sequence("waiter")
    wait = cache_pb2.Wait(leader=common_pb2.SequenceKey(sequence_id="leader", attempt=1), position=32)
    parking.park(state, waiter, wait, 0.0)
    return waiter


def test_whoever_waits_asks_again_when_the_prefix_is_reported(
    state: CacheState, leader: CacheSequence, waiter: CacheSequence
) -> None:
    leader.acked_computed_tokens = 31
    parking.wake(state, 1.0)
    assert waiter.state is SequenceState.PARKED
    leader.acked_computed_tokens = 32
    parking.wake(state, 1.0)
    assert (waiter.state, waiter.no_wait, state.parked) == (SequenceState.WAITING, False, [])


def test_whoever_waits_for_a_leader_that_stands_still_computes_it_itself(
    state: CacheState, leader: CacheSequence, waiter: CacheSequence
) -> None:
    """Patience begins anew with each progress of the leader."""
    leader.progress_at = 3.0
    parking.wake(state, 3.0 + _PATIENCE - 0.1)
    assert waiter.state is SequenceState.PARKED
    parking.wake(state, 3.0 + _PATIENCE)
    assert (waiter.state, waiter.no_wait, state.parked) == (SequenceState.WAITING, True, [])


def test_a_leader_in_a_step_is_waited_for_however_long_the_step_takes(
    state: CacheState, leader: CacheSequence, waiter: CacheSequence
) -> None:
    """Nothing else can be computed before the step ends. Not if the step is one of decoding: all of the prefix is computed."""
    cache = EngineCache(state.settings)
    cache.state = state
    cache.begin_step([leader])
    ends = 100 * _PATIENCE
    parking.wake(state, ends)
    assert waiter.state is SequenceState.PARKED
    cache.end_step([Computed(leader, 3, None)], ends)
    parking.wake(state, ends + _PATIENCE - 0.1)
    assert waiter.state is SequenceState.PARKED
    cache.begin_step([leader])
    leader.num_computed_tokens = 32
    parking.wake(state, ends + _PATIENCE)
    assert (waiter.state, waiter.no_wait, state.parked) == (SequenceState.WAITING, True, [])


def test_a_report_is_urgent_when_what_somebody_waits_for_is_computed(
    state: CacheState, leader: CacheSequence, waiter: CacheSequence
) -> None:
    leader.num_computed_tokens = 31
    assert not parking.is_waited_for(state, leader)
    leader.num_computed_tokens = 32
    assert parking.is_waited_for(state, leader)
    assert not state.is_urgent
    parking.park(state, _sequence("late"), cache_pb2.Wait(leader=leader.key, position=32), 0.0)
    assert state.is_urgent, "computed before it was told to wait: nothing else would send the report"


@pytest.mark.parametrize(("level", "waits"), [(-1, False), (0, True), (1, True)])
def test_nobody_waits_for_a_leader_of_a_worse_level(
    state: CacheState, leader: CacheSequence, level: int, waits: bool
) -> None:
    """It may get nowhere for long while others of the better level are computed."""
    sequence = _sequence("other")
    sequence.level = level
    parking.park(state, sequence, cache_pb2.Wait(leader=leader.key, position=32), 0.0)
    assert (sequence.state is SequenceState.PARKED, sequence.no_wait, len(state.parked)) == (waits, not waits, waits)
    assert sequence.next_round().level == level
