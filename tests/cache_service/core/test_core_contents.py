"""What a follower of the contents is told, where the state machine seldom comes."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core.contents import Cleared, Removed
from tests.cache_service.core.contents_follower import ContentsFollower
from tests.cache_service.core.desk import Desk
from tests.cache_service.core.lockstep import Lockstep

pytestmark = pytest.mark.usefixtures("every_hash")

FIRST = [1, 2, 3, 4]


def evicted_while_another_computes_it(lockstep: Lockstep) -> Desk:
    """The only copy of FIRST goes to a reserve; the worker that is returned has a sequence that has not computed it yet."""
    small = Desk(num_blocks=4, worker_id="small", lockstep=lockstep)
    small.serve("cached", [*FIRST, 0])
    other = Desk(worker_id="other", lockstep=lockstep)
    other.grant("computing", [*FIRST, 0])
    lockstep.manager.follow_contents(100)
    while lockstep.sweep():
        pass
    assert small.refill(3)
    return other


def test_a_node_that_goes_after_its_removal_was_read_is_reported_as_forgotten() -> None:
    """One event for an eviction and its node is enough only while nobody has read that event."""
    lockstep = Lockstep()
    other = evicted_while_another_computes_it(lockstep)
    contents = lockstep.manager.follow_contents(100)
    events = contents.since(0, 100)
    assert events is not None
    assert isinstance(events[-1], Removed)
    assert not events[-1].forgotten
    other.free("computing")
    assert contents.since(events[-1].number, 100) == [
        Removed(events[-1].number + 1, events[-1].node, 0, forgotten=True)
    ]


def test_a_whole_state_that_has_a_node_is_followed_by_the_event_that_it_goes() -> None:
    lockstep = Lockstep()
    other = evicted_while_another_computes_it(lockstep)
    follower = ContentsFollower(seed=0, capacity=100)
    whole = lockstep.manager.follow_contents(100).whole()
    (node,) = {stored.node for stored in whole.part(100)}
    other.free("computing")
    events = lockstep.manager.follow_contents(100).since(whole.number, 100)
    assert events is not None
    assert [event.node for event in events if isinstance(event, Removed) and event.forgotten] == [node]
    follower.follow(lockstep.manager, now=True)


def test_a_block_that_takes_over_is_no_event() -> None:
    """The copy that serves hits goes, another block of the pool has the same content: it is a hit as before."""
    lockstep = Lockstep()
    worker = Desk(num_blocks=5, lockstep=lockstep)
    for name in ("a", "b"):
        worker.grant(name, FIRST, no_wait=True)
        worker.report(name)
    contents = lockstep.manager.follow_contents(100)
    while contents.list_some(100):
        pass
    number = contents.last_number
    worker.free("a")
    worker.refill(3)
    assert worker.counts.cached == 0, "the first copy was evicted"
    assert contents.since(number, 100) == []


def test_nothing_of_a_cleared_session_is_removed_again() -> None:
    """Its memory is swept in slices, and then its nodes are forgotten, once each."""
    lockstep = Lockstep()
    worker = Desk(lockstep=lockstep)
    worker.serve("a", [*FIRST, 5, 6, 7, 8, 0])
    follower = ContentsFollower(seed=0, capacity=100)
    follower.follow(lockstep.manager, now=True)
    contents = lockstep.manager.follow_contents(100)
    number = contents.last_number
    worker.lockstep.deregister(worker.number)
    while lockstep.sweep():
        pass
    events = contents.since(number, 100)
    assert events is not None
    assert [type(event).__name__ for event in events] == ["Cleared", "Removed", "Removed"]
    assert all(event.session == 0 and event.forgotten for event in events if isinstance(event, Removed))
    follower.follow(lockstep.manager, now=True)


def test_a_session_that_ends_while_it_is_listed_is_listed_no_further() -> None:
    """What is stored in it after it was cleared would never be removed."""
    lockstep = Lockstep()
    worker = Desk(lockstep=lockstep)
    worker.serve("a", [*range(12), 0])
    contents = lockstep.manager.follow_contents(100)
    contents.list_some(2)
    lockstep.deregister(worker.number)
    while contents.list_some(2):
        pass
    events = contents.since(0, 100)
    assert events is not None
    assert isinstance(events[-1], Cleared)


def test_what_happens_while_nobody_follows_is_missed_by_who_comes_back() -> None:
    lockstep = Lockstep()
    worker = Desk(lockstep=lockstep)
    number = lockstep.manager.follow_contents(100).last_number
    lockstep.manager.end_contents()
    worker.serve("a", [*FIRST, 0])
    assert lockstep.manager.follow_contents(100).since(number, 100) is None


def test_a_follower_that_is_later_than_the_ring_gets_none_of_its_events() -> None:
    """Whatever was overwritten is missing: it must take the whole state anew."""
    desk = Desk()
    contents = desk.manager.follow_contents(4)
    while contents.list_some(10):
        pass
    for number in range(3):
        desk.serve(f"s{number}", range(number * 100, number * 100 + 9))
    last = contents.last_number
    assert last > 4
    assert contents.since(last - 5, 100) is None
    kept = contents.since(last - 4, 100)
    assert kept is not None
    assert [event.number for event in kept] == list(range(last - 3, last + 1))
