"""Several answers and beams in the scheduler: what the laws meet too seldom."""

from __future__ import annotations

import pytest

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
    kept, world.cache.blocks = world.cache.blocks[2:], world.cache.blocks[:2]
    batch = world.launch()
    assert [part.request for part in batch] == [group, group]
    world.land()
    world.cache.blocks += kept
    world.scheduler._preempt(group, 0.0)
    world.run_dry()
    assert group.num_preemptions == 1


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_request_alone_gives_back_what_only_its_end_can_bring_back(is_refused: bool) -> None:
    """The manager has no room for its forks, so their parents keep their blocks. Otherwise it waits for those that are on their
    way."""
    world = SchedulerWorld(num_blocks=24, block_size=1, max_num_seqs=6)
    group = world.submit(2, 5, n=3, num_beams=3)
    world.turns(3)
    assert len(group.sequences) == 3
    world.cache.settle()
    kept, world.cache.blocks = world.cache.blocks, []
    world.cache.forks_hold_blocks = is_refused
    assert not world.launch()
    assert group.num_preemptions == is_refused
    world.cache.blocks += kept
    world.cache.forks_hold_blocks = False
    world.run_dry()


def test_what_comes_back_with_the_last_preemption_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks that the manager does not know give their blocks back without a call, when the last that needs them has ended. The
    first request was passed over by then, and no reply would wake the engine."""
    world = SchedulerWorld(num_blocks=24, block_size=1)
    first, *others = [world.submit(2, 9) for _ in range(3)]
    world.turns(3)
    assert world.scheduler.num_running == 3
    world.cache.settle()
    world.cache.blocks = []
    free = world.cache.free

    def free_late(sequence: CacheSequence) -> None:
        free(sequence)
        if all(world.cache.num_freed[other.params.sequence_id] for other in others):
            world.cache.settle()

    monkeypatch.setattr(world.cache, "free", free_late)
    # Those that have ended wait for each other, so nothing is on its way.
    monkeypatch.setattr(type(world.cache), "is_exhausted", property(lambda cache: not cache.blocks))
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
