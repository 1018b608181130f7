"""What followers of the contents and of pictures are told, where the state machine seldom comes."""

from __future__ import annotations

import pytest

from kvpool.cache_service.core import block_mirror
from kvpool.cache_service.core import pictures as pictures_module
from kvpool.cache_service.core.contents import Cleared, Removed
from kvpool.cache_service.core.pictures import MAX_MISSED, Change, Pictures, Viewer, Wish
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


class Watched:
    """The pictures of a cluster, and who looks at them."""

    def __init__(self, desk: Desk) -> None:
        self.pictures = Pictures(desk.manager)
        self.viewers: list[Viewer] = []

    def join(self, wish: Wish) -> Viewer:
        """One more viewer, which has a whole picture."""
        self.viewers.append(self.pictures.join(wish))
        (change,) = self.show(self.viewers[-1])
        assert change.is_whole
        return self.viewers[-1]

    def show(self, *viewers: Viewer) -> list[Change]:
        """A picture, which these look at; the others miss it."""
        while self.pictures.step():
            pass
        self.pictures.take()
        return [self.pictures.show(viewer) for viewer in viewers]

    def num_kept(self) -> int:
        """Lists of changed blocks that are kept for viewers who have missed them."""
        return sum(len(mirror._listed) for mirrors in self.pictures._mirrors.values() for mirror in mirrors)


def test_what_everybody_has_seen_is_not_kept() -> None:
    """Sequences end, blocks change, and workers leave in every picture."""
    lockstep = Lockstep()
    desk = Desk(lockstep=lockstep)
    watched = Watched(desk)
    viewer = watched.join(Wish(include_blocks=True, max_sequences=10))
    for number in range(5):
        other = Desk(worker_id=f"other {number}", lockstep=lockstep)
        desk.grant(str(number), [number, 1, 2])
        watched.show(viewer)
        desk.free(str(number), 3)
        lockstep.deregister(other.number)
        (change,) = watched.show(viewer)
        assert change.ended_sessions == (other.number,)
        assert sum(len(one.ended_sequences) for one in change.sessions) == 1
        watched.show(viewer)
        assert watched.num_kept() == 0


@pytest.mark.parametrize(("num_missed", "is_whole"), [(MAX_MISSED, False), (MAX_MISSED + 1, True)])
def test_one_that_has_missed_too_many_pictures_gets_everything_and_nothing_is_kept_for_it(
    num_missed: int, is_whole: bool
) -> None:
    desk = Desk()
    watched = Watched(desk)
    wish = Wish(include_blocks=True, max_sequences=10)
    slow, quick = watched.join(wish), watched.join(wish)
    watched.show(slow, quick)
    for number in range(num_missed):
        desk.serve(str(number), [number, 1, 2])
        watched.show(quick)
    assert watched.num_kept() <= MAX_MISSED
    assert (slow.shown is None) == is_whole
    assert watched.pictures.show(slow).is_whole == is_whole


def test_many_changed_blocks_are_sent_as_a_whole_pool_and_few_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have changed before: what was sent does not count any more."""
    monkeypatch.setattr(block_mirror, "MAX_LISTED_BLOCKS", 10)
    desk = Desk()
    watched = Watched(desk)
    wish = Wish(include_blocks=True)
    slow, quick = watched.join(wish), watched.join(wish)
    for number in range(4):
        desk.grant(f"a {number}", list(range(24)), no_wait=True, max_cached_tokens=0)
        (change,) = watched.show(quick)
        (columns,) = change.sessions[0].blocks
        assert columns is not None
        assert columns.ids is not None
        assert len(columns.ids) == 6
        desk.free(f"a {number}")
        watched.show(quick)
    (change,) = watched.show(slow)
    (columns,) = change.sessions[0].blocks
    assert columns is not None
    assert columns.ids is None


def test_what_only_a_gone_viewer_has_watched_is_dropped() -> None:
    desk = Desk()
    watched = Watched(desk)
    stays, goes = watched.join(Wish(max_sequences=3)), watched.join(Wish(include_blocks=True))
    watched.show(stays, goes)
    watched.pictures.leave(goes)
    assert (watched.pictures._mirrors, watched.pictures._shown) == ({}, {})


def test_all_workers_together_show_only_so_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures_module, "MAX_SEQUENCES", 5)
    lockstep = Lockstep()
    desks = [Desk(worker_id=name, lockstep=lockstep) for name in ("one", "two")]
    for desk in desks:
        for number in range(4):
            desk.grant(f"{desk.worker_id} {number}", [number])
    pictures = Pictures(desks[0].manager)
    viewer = pictures.join(Wish(max_sequences=4))
    pictures.take()
    assert [len(one.sequences) for one in pictures.show(viewer).sessions] == [2, 2]


def test_under_another_epoch_everybody_gets_everything() -> None:
    """What a viewer has seen is of sessions that have ended."""
    desk = Desk()
    watched = Watched(desk)
    viewer = watched.join(Wish())
    desk.manager.raise_epoch(desk.manager.epoch + 1)
    (change,) = watched.show(viewer)
    assert (change.is_whole, change.epoch) == (True, desk.manager.epoch)


def test_the_blocks_of_a_worker_that_has_come_since_the_last_step_are_sent_once() -> None:
    """It registers between the steps that prepare a picture and the picture."""
    desk = Desk()
    desk.grant("a", [1, 2, 3])
    pictures = Pictures(desk.manager)
    viewer = pictures.join(Wish(include_blocks=True))
    pictures.take()
    assert pictures.show(viewer).sessions[0].blocks
    pictures.take()
    assert pictures.show(viewer).sessions == ()
