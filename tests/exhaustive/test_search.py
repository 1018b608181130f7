"""The search finds no broken law in small worlds, and finds each that is broken on purpose, with a short way there.

`make prove KIND=exhaustive` searches the large ones.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.cache_service.core.fencing import Fencing
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Uplink
from kvpool.cache_service.core.sequence import Sequence
from kvpool.cache_service.core.session import Session
from kvpool.v1 import cache_pb2
from kvpool.worker_service.cache import forks, naming, parking
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.groups.state import RunningState
from kvpool.worker_service.cache.groups.window import Ring
from kvpool.worker_service.cache.ledger import BlockLedger
from kvpool.worker_service.cache.link_state import LinkState
from kvpool.worker_service.cache.sequence import CacheSequence
from kvpool.worker_service.cache.state import CacheState
from tests.exhaustive.fingerprint import fingerprint
from tests.exhaustive.search import Search, freeze, tell, thaw
from tests.exhaustive.share import Reached, Share, pack
from tests.exhaustive.starts import STARTS
from tests.exhaustive.world import MISHAPS, Budget, Event, Wanted, World, begin

SHARED = (Wanted("a", (1, 2), 2, worker=0), Wanted("b", (1, 2, 3), 1, worker=0))
SINGLE = (Wanted("a", (1, 2), 2, worker=0),)
FORKED = (Wanted("a", (1, 2, 3), 3, worker=0),)
SHORT = (Wanted("a", (1, 2), 1, worker=0),)
PAIR = (Wanted("a", (1, 2), 1, worker=0), Wanted("b", (1, 2, 3), 1, worker=0))


def test_every_state_of_a_small_world_is_right() -> None:
    """One fault at every possible moment; the counts of states and ends say that something was searched."""
    found = Search(begin(PAIR, Budget(faults=1))).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.num_states > 200
    assert found.num_ends > 1
    assert found.kinds["lose Allocate answer"]
    assert found.kinds["double Allocate"]
    assert found.kinds["give up Free"]


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, reached: Counter[str]) -> None:
    """Add the calls of a function or method to `reached`."""
    original = getattr(kind, name)

    def function(*arguments: Any) -> Any:
        reached[name] += 1
        return original(*arguments)

    monkeypatch.setattr(kind, name, function)


def smaller(name: str) -> World:
    """The world of `make prove KIND=exhaustive` without its fault, where a call and its answer are one event."""
    return replace(STARTS[name], at_once=True, budget=Budget()).begin()


def test_every_state_of_a_world_with_a_window_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt parts from another one that is being computed, at every possible moment; a long one turns its ring."""
    reached: Counter[str] = Counter()
    for kind, name in (
        (Ring, "name"),
        (Ring, "_release"),
        (naming, "add_boundary"),
        (BlockLedger, "accept_window"),
        (BlockPool, "release_demoted"),
    ):
        count_calls(monkeypatch, kind, name, reached)
    found = Search(smaller("parting, fault, window"), num_processes=1).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.num_states > 500
    assert set(reached) == {"name", "_release", "add_boundary", "accept_window", "release_demoted"}


def test_every_state_of_a_world_with_recurrent_layers_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt parts from another one that is being computed, at every moment; it goes on from a snapshot, or is too late."""
    reached: Counter[str] = Counter()
    for kind, name in ((RunningState, "name"), (RunningState, "_release"), (naming, "add_boundary")):
        count_calls(monkeypatch, kind, name, reached)
    use = RunningState.state_use

    def counted_use(state: RunningState, num_computed_tokens: int, num_slots: int) -> Any:
        found = use(state, num_computed_tokens, num_slots)
        reached["a hit is read"] += found.source not in (0, found.running)
        return found

    monkeypatch.setattr(RunningState, "state_use", counted_use)
    found = Search(smaller("parting, fault, state"), num_processes=1).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.num_states > 500
    assert {name for name, count in reached.items() if count} == {"name", "_release", "add_boundary", "a hit is read"}


def test_every_state_of_a_world_with_forks_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is forked at every possible moment, and either ends first; a fork that ends before it was stated is taken back."""
    reached: Counter[str] = Counter()
    count_calls(monkeypatch, forks, "_give_back", reached)
    found = Search(STARTS["fork, fault"].begin(), num_processes=1).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.num_states > 2000
    assert reached["_give_back"]
    assert {"fork", "lose Fork answer", "double Fork", "give up Fork"} <= set(found.kinds)


def test_every_state_around_a_restart_is_right() -> None:
    """The manager or a worker starts anew, or a lease runs out, at every possible moment; reports are taken in."""
    found = Search(begin(SHORT, Budget(restarts=1))).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.kinds["deliver Report"]
    assert {"restart the manager", "crash", "expire", "sweep", "go on elsewhere"} <= set(found.kinds)


def test_two_processes_find_what_one_finds() -> None:
    """States are divided by fingerprints: no count depends on it, and none on which way to a state was found first."""
    start = begin(SHORT, Budget(restarts=1), at_once=True)
    alone, together = (Search(start, num_processes=count).run() for count in (1, 2))
    assert alone.is_complete
    assert together.is_complete
    assert alone.num_states > 100
    for name in ("num_states", "num_visits", "num_transitions", "num_ends", "depth", "kinds"):
        assert getattr(alone, name) == getattr(together, name)


def test_a_state_that_is_reached_with_more_left_is_gone_through_again() -> None:
    """Only then; and of what is planned for a level only what nothing else covers."""

    def reached(budget: Budget) -> list[bytes]:
        return [pack([Reached.at_start(freeze(begin(SHORT, budget)))])]

    share = Share(0, 1)
    assert share.take(reached(Budget(faults=1))) == 1
    assert share.take(reached(Budget())) == 1
    assert share.take(reached(Budget(restarts=1))) == 2
    assert share.take(reached(Budget(faults=2))) == 2
    level = share.go_on(0)
    assert (level.num_states, level.num_visits) == (1, 2)
    num_next = share.take([])
    assert share.take(reached(Budget(faults=2))) == num_next
    assert share.take(reached(Budget(faults=2, restarts=1))) == num_next + 1
    level = share.go_on(1)
    assert level.num_visits > level.num_states


def test_parts_that_are_shared_do_not_change() -> None:
    """A copy that shares the manager and the workers with others until it changes them comes to what one comes to that shares
    nothing, and leaves the others as they were."""
    state = freeze(begin(PAIR, Budget(restarts=1, faults=1), at_once=True))
    seen: set[bytes] = set()
    for _ in range(12):
        events = thaw(state).events()
        for event in events:
            shared, alone = thaw(state), thaw(state)
            alone._manager_to_change()
            for worker in range(2):
                alone._peer_to_change(worker)
            shared.apply(event)
            alone.apply(event)
            assert fingerprint(shared) == fingerprint(alone)
        assert all(fingerprint(thaw(pickle.loads(pickle.dumps(state)))) == fingerprint(thaw(state)) for _ in range(2))
        untouched = thaw(state)
        untouched.parts = [None, None, None]  # look at the parts themselves, not at what is known of them
        assert fingerprint(untouched) == fingerprint(thaw(state))
        seen.add(fingerprint(untouched))
        for event in events:
            after = thaw(state)
            after.apply(event)
            if fingerprint(after) not in seen:
                state = freeze(after)
                break
    assert len(seen) == 12


def test_a_mishap_needs_a_call() -> None:
    """Nothing goes wrong with the call of a worker that has nothing to say, and each fault takes from the budget."""
    found = Search(begin(SHORT, Budget(faults=1), at_once=True)).run()
    assert found.is_complete
    mishaps = {kind: count for kind, count in found.kinds.items() if kind.startswith("say, ")}
    assert set(mishaps) == {f"say, {how}" for how in MISHAPS}
    assert len(set(mishaps.values())) == 1
    assert found.kinds["say"] > mishaps["say, slow"]


def test_what_decides_tells_states_apart() -> None:
    """Each of these was forgotten once: the manager may be away, so that nothing is given back to it."""
    world = begin(SINGLE, Budget())
    before = fingerprint(world)
    world.peers[0].engine.cache._state.link.failed(0.0)  # type: ignore[union-attr]
    assert fingerprint(world) != before


def test_copies_are_equal_and_independent() -> None:
    """A world that was frozen is what it was, whatever becomes of its copies."""
    world = begin(SHARED, Budget(faults=1))
    data, before = freeze(world), fingerprint(world)
    copy = thaw(data)
    copy.apply(Event("ask", 0))
    copy.apply(Event("say", 0))
    assert fingerprint(copy) != before
    assert fingerprint(world) == fingerprint(thaw(data)) == before


def test_absolute_numbers_do_not_tell_states_apart() -> None:
    """A heartbeat, a session or a grant more in the past leaves no trace in the fingerprint."""

    def run_once(world: World) -> None:
        world.apply(Event("ask", 0))
        while not world.is_over:
            world.apply(
                next(event for event in world.events() if event.what in EXPECTED and _does_something(world, event))
            )

    fresh = begin(SINGLE, Budget())
    twice = begin(SINGLE, Budget())
    run_once(fresh)
    run_once(twice)
    assert fingerprint(fresh) == fingerprint(twice)
    generation = twice.manager.last_generation
    session = twice.manager.sessions[0]
    session.last_call_no += 5
    twice.peers[0].engine.cache._state.link.num_calls += 5  # type: ignore[union-attr]
    twice.manager._last_stamp += 7
    assert fingerprint(fresh) == fingerprint(twice)
    assert twice.manager.last_generation > generation


EXPECTED = ("say", "deliver", "begin a step", "end the step")


def _does_something(world: World, event: Event) -> bool:
    after = thaw(freeze(world))
    after.apply(event)
    return fingerprint(after) != fingerprint(world)


# -- broken on purpose


def stale_calls_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager has forgotten which call was the last."""
    honest = CacheManager._begin

    def forgetful(self: CacheManager, uplink: Uplink, num_items: int, *, reporting: bool = False) -> Session:
        if uplink.session in self._sessions:
            self._sessions[uplink.session].last_call_no = 0
        return honest(self, uplink, num_items, reporting=reporting)

    monkeypatch.setattr(CacheManager, "_begin", forgetful)


def steps_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker frees blocks although a running step names them."""
    monkeypatch.setattr(EngineCache, "begin_step", lambda self, sequences: None)


def launched_counts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker states tokens as computed when the step that computes them begins."""
    honest = EngineCache.begin_step

    def hasty(self: EngineCache, sequences: Iterable[CacheSequence]) -> None:
        sequences = list(sequences)
        honest(self, sequences)
        for sequence in sequences:
            self._advance(sequence, len(sequence.tokens), 0.0)

    monkeypatch.setattr(EngineCache, "begin_step", hasty)


def entries_are_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker takes every entry of the downlink that it is told, also one that it has applied."""
    honest = LinkState.new_entries

    def credulous(self: LinkState, downlink: cache_pb2.Downlink) -> list[cache_pb2.DownlinkEntry]:
        honest(self, downlink)
        return list(downlink.entries)

    monkeypatch.setattr(LinkState, "new_entries", credulous)


def parked_sequences_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who waits for a prefix in flight is woken."""
    monkeypatch.setattr(parking, "wake", lambda state, now: None)


def state_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that holds blocks registers as if it held none."""
    monkeypatch.setattr(EngineCache, "holds_state", False)


def the_smaller_attempt_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger attempt fences nothing."""

    def nothing(self: Fencing, sequence: Sequence) -> None:
        return None

    monkeypatch.setattr(Fencing, "fence", nothing)


def parents_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker frees a parent although the manager does not know of its fork."""
    monkeypatch.setattr(CacheState, "is_parent", lambda self, sequence: False)


def copies_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker frees a parent although a step has yet to copy its tail."""
    monkeypatch.setattr(CacheSequence, "is_busy", property(lambda self: self.in_step))


@pytest.mark.parametrize(
    ("breaks", "law"),
    [(parents_are_not_waited_for, "everything can end"), (copies_are_not_waited_for, "use after free")],
)
def test_forks_that_are_forgotten_are_found(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch], None], law: str
) -> None:
    """The search names the law that does not hold."""
    breaks(monkeypatch)
    found = Search(begin(FORKED, Budget(forks=1, cancels=1), num_blocks=(7,))).run()
    assert law in found.broken


@pytest.mark.parametrize(
    ("breaks", "wanted", "budget", "law", "most_events"),
    [
        (stale_calls_are_executed, SINGLE, Budget(faults=1), "a late Allocate does nothing", 8),
        (steps_are_not_waited_for, SHARED, Budget(cancels=1), "use after free", 20),
        (launched_counts_as_computed, SINGLE, Budget(), "exact hits", 10),
        (entries_are_applied_twice, SINGLE, Budget(heartbeats=1), "the books agree", 16),
        (parked_sequences_are_forgotten, SHARED, Budget(), "everything can end", 20),
        (state_is_denied, SHORT, Budget(restarts=1), "a report is always taken in", 14),
        (the_smaller_attempt_stays, SHORT, Budget(moves=1), "one attempt lives", 14),
    ],
)
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch,
    breaks: Callable[[pytest.MonkeyPatch], None],
    wanted: tuple[Wanted, ...],
    budget: Budget,
    law: str,
    most_events: int,
) -> None:
    """The search names the law and tells the shortest way to where it does not hold."""
    breaks(monkeypatch)
    start = begin(wanted, budget)
    found = Search(start).run()
    assert law in found.broken
    lines = tell(start, found.trace)
    print(found.broken, *lines, sep="\n")
    assert 0 < len(lines) <= most_events
