"""Several answers and beams in the scheduler: what the laws meet too seldom."""

from __future__ import annotations

import pytest

from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.sequence import CacheSequence
from tests.worker_service.scheduler_world import SchedulerWorld


def test_a_group_that_is_preempted_between_its_beams_forgets_what_some_of_them_had_computed() -> None:
    """Only two of three beams find a block, the third one's comes too late: the group is taken away before."""
    world = SchedulerWorld(num_blocks=24, block_size=1, max_num_seqs=6)
    group = world.submit(2, 5, n=3, num_beams=3)
    worse = world.submit(2, 12)
    world.turns(3)
    assert len(group.sequences) == 3
    assert worse in world.scheduler._running
    with world.with_spare(2):
        batch = world.begin_step()
    assert [part.request for part in batch] == [group, group]
    world.end_step()
    world.preempt(group, 0.0)
    world.run_dry()
    assert group.num_preemptions == 1


def test_a_request_alone_keeps_its_blocks_and_waits_for_those_that_are_on_their_way() -> None:
    """Unless only its end can bring them back: test_forks_over_core.py."""
    world = SchedulerWorld(num_blocks=24, block_size=1, max_num_seqs=6)
    group = world.submit(2, 5, n=3, num_beams=3)
    world.turns(3)
    assert len(group.sequences) == 3
    world.talk()
    world.cache._state.pool_is_empty = [True]
    with world.with_spare(0):
        assert not world.begin_step()
    assert not group.num_preemptions
    world.run_dry()


def test_what_comes_back_with_the_last_preemption_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks that the manager does not know give their blocks back without a call, when the last that needs them has ended. The
    first request was passed over by then, and no reply would wake the engine."""
    world = SchedulerWorld(num_blocks=12, block_size=1)
    first, *others = [world.submit(2, 9) for _ in range(3)]
    world.turns(3)
    assert world.scheduler.num_running == 3
    free = world.cache.free

    def free_late(sequence: CacheSequence) -> None:
        free(sequence)
        if world.scheduler._running.last is first:
            world.talk()

    monkeypatch.setattr(world.cache, "free", free_late)
    # Those that have ended wait for each other, so nothing is on its way.
    monkeypatch.setattr(EngineCache, "is_exhausted", property(lambda cache: not cache.num_spare_blocks[0]))
    batch = world.scheduler.schedule(0.0)
    assert [part.request for part in batch] == [first]
    assert [other.num_preemptions for other in others] == [1, 1]


@pytest.mark.parametrize("max_num_seqs", [4, 5, 9])
def test_answers_take_the_places_that_their_request_was_admitted_with(max_num_seqs: int) -> None:
    """Those for which the batch has places share the prompt at once, the others wait."""
    world = SchedulerWorld(max_num_seqs=max_num_seqs, max_num_batched_tokens=40)
    request = world.submit(6, 9, n=6)
    world.turns()
    assert world.scheduler.num_running == min(6, max_num_seqs)
    assert world.scheduler.num_waiting == 6 - world.scheduler.num_running
    assert len(request.answers) == 6
    world.run_dry()
