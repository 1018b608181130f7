"""The search finds no broken law in small worlds, and finds each that is broken on purpose, with a short way there.

`make prove KIND=exhaustive` searches the large ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvpool.cache_service.core.block_pool import BlockPool
from kvpool.worker_service.cache import forks, naming, parking
from kvpool.worker_service.cache.engine_cache import EngineCache
from kvpool.worker_service.cache.groups.state import RunningState
from kvpool.worker_service.cache.groups.window import Ring
from kvpool.worker_service.cache.ledger import BlockLedger
from tests.exhaustive.fingerprint import fingerprint
from tests.exhaustive.search import Search, freeze, tell
from tests.exhaustive.starts import STARTS
from tests.exhaustive.world import MISHAPS, Budget, Event, Start, Wanted, World

SHARED = (Wanted("a", (1, 2), 2, worker=0), Wanted("b", (1, 2, 3), 1, worker=0))
SINGLE = (Wanted("a", (1, 2), 2, worker=0),)
SHORT = (Wanted("a", (1, 2), 1, worker=0),)
PAIR = (Wanted("a", (1, 2), 1, worker=0), Wanted("b", (1, 2, 3), 1, worker=0))


def smaller(name: str) -> Start:
    """The world of `make prove KIND=exhaustive` without its fault, where a call and its answer are one event."""
    return replace(STARTS[name], at_once=True, budget=Budget())


def count_calls(monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, reached: Counter[str]) -> None:
    """Add the calls of a function or method to `reached`."""
    original = getattr(kind, name)

    def function(*arguments: Any) -> Any:
        reached[name] += 1
        return original(*arguments)

    monkeypatch.setattr(kind, name, function)


def count_hits_of_states(monkeypatch: pytest.MonkeyPatch, reached: Counter[str]) -> None:
    """Add the states that a step reads from a snapshot."""
    use = RunningState.state_use

    def counted_use(state: RunningState, num_computed_tokens: int, num_slots: int) -> Any:
        found = use(state, num_computed_tokens, num_slots)
        reached["a hit is read"] += found.source not in (0, found.running)
        return found

    monkeypatch.setattr(RunningState, "state_use", counted_use)


_NAMED = (naming, "add_boundary")
WORLDS: dict[str, tuple[Start, int, set[str], tuple[tuple[Any, str], ...]]] = {
    # One fault at every possible moment.
    "fault": (
        Start(PAIR, Budget(faults=1)),
        200,
        {"lose Allocate answer", "double Allocate", "give up Free"},
        (),
    ),
    # The manager or a worker starts anew, or a lease runs out, at every possible moment; reports are taken in.
    "restart": (
        Start(SHORT, Budget(restarts=1)),
        200,
        {"deliver Report", "restart the manager", "crash", "expire", "sweep", "go on elsewhere"},
        (),
    ),
    # A prompt parts from another one that is being computed, at every possible moment; a long one turns its ring.
    "window": (
        smaller("parting, fault, window"),
        500,
        set(),
        ((Ring, "name"), (Ring, "_release"), _NAMED, (BlockLedger, "accept_window"), (BlockPool, "release_demoted")),
    ),
    # The same; it goes on from a snapshot, or is too late.
    "state": (
        smaller("parting, fault, state"),
        500,
        set(),
        ((RunningState, "name"), (RunningState, "_release"), _NAMED),
    ),
    # A sequence is forked at every possible moment, and either ends first; a fork that ends before it was stated is taken back.
    "fork, fault": (
        STARTS["fork, fault"],
        2000,
        {"fork", "lose Fork answer", "double Fork", "give up Fork"},
        ((forks, "_give_back"),),
    ),
}
"""By name: the world, how many states it has at least, what happens in them, and what the code does meanwhile."""


@pytest.mark.parametrize("name", WORLDS)
def test_every_state_of_a_world_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of states and ends say that something was searched."""
    start, least, kinds, counted = WORLDS[name]
    reached: Counter[str] = Counter()
    for kind, function in counted:
        count_calls(monkeypatch, kind, function, reached)
    if name == "state":
        count_hits_of_states(monkeypatch, reached)
        counted = (*counted, (None, "a hit is read"))
    found = Search(start.begin()).run()
    assert not found.broken, found.broken
    assert found.is_complete
    assert found.num_states > least
    assert found.num_ends > 1
    assert kinds <= set(found.kinds)
    assert {name for name, count in reached.items() if count} == {name for _, name in counted}


def test_a_state_that_is_reached_with_more_left_is_gone_through_again() -> None:
    """Only then; and of what is planned for a level only what nothing else covers."""

    def reach(budget: Budget) -> int:
        search.reach(Start(SHORT, budget).begin())
        return sum(map(len, search._next.values()))

    search = Search(Start(SHORT, Budget()).begin())
    assert reach(Budget(faults=1)) == 1
    assert reach(Budget()) == 1
    assert reach(Budget(restarts=1)) == 2
    assert reach(Budget(faults=2)) == 2
    search.go_on()
    assert (search.found.num_states, search.found.num_visits) == (1, 2)
    num_next = search.found.num_waiting
    assert reach(Budget(faults=2)) == num_next
    assert reach(Budget(faults=2, restarts=1)) == num_next + 1
    search.go_on()
    assert search.found.num_visits > search.found.num_states


def test_parts_that_are_shared_do_not_change() -> None:
    """A copy that shares the manager and the workers with others until it changes them comes to what one comes to that shares
    nothing, and leaves the others as they were."""
    state = freeze(Start(PAIR, Budget(restarts=1, faults=1), at_once=True).begin())
    seen: set[bytes] = set()
    for _ in range(12):
        events = World.thaw(state).events()
        for event in events:
            shared, alone = World.thaw(state), World.thaw(state)
            alone._manager_to_change()
            for worker in range(2):
                alone._peer_to_change(worker)
            shared.apply(event)
            alone.apply(event)
            assert fingerprint(shared) == fingerprint(alone)
        untouched = World.thaw(state)
        untouched.parts = [None, None, None]  # look at the parts themselves, not at what is known of them
        assert fingerprint(untouched) == fingerprint(World.thaw(state))
        seen.add(fingerprint(untouched))
        for event in events:
            after = World.thaw(state)
            after.apply(event)
            if fingerprint(after) not in seen:
                state = freeze(after)
                break
    assert len(seen) == 12


def test_a_mishap_needs_a_call() -> None:
    """Nothing goes wrong with the call of a worker that has nothing to say, and each fault takes from the budget."""
    found = Search(Start(SHORT, Budget(faults=1), at_once=True).begin()).run()
    assert found.is_complete
    mishaps = {kind: count for kind, count in found.kinds.items() if kind.startswith("say, ")}
    assert set(mishaps) == {f"say, {how}" for how in MISHAPS}
    assert len(set(mishaps.values())) == 1
    assert found.kinds["say"] > mishaps["say, slow"]


def test_what_decides_tells_states_apart() -> None:
    """Each of these was forgotten once: the manager may be away, so that nothing is given back to it; what it refused for."""
    world = Start(SINGLE, Budget()).begin()
    before = fingerprint(world)
    world.peers[0].engine.cache.state.link.failed(0.0)  # type: ignore[union-attr]
    assert (away := fingerprint(world)) != before
    world.peers[0].engine.cache.state.waits_for_blocks = False
    assert fingerprint(world) != away


def test_absolute_numbers_do_not_tell_states_apart() -> None:
    """A call or a grant more in the past leaves no trace in the fingerprint."""
    world = Start(SINGLE, Budget(), at_once=True).begin()
    world.apply(Event("ask", 0))
    while not world.is_over:
        for event in world.events():
            if event.at == 0 and event.what in ("say", "begin a step", "end the step"):
                world.apply(event)
    before = fingerprint(world)
    world.manager.sessions[0].last_call_no += 5
    world.peers[0].engine.cache.state.link.num_calls += 5  # type: ignore[union-attr]
    world.manager.last_generation += 7
    assert fingerprint(world) == before


@pytest.mark.parametrize(
    ("kind", "name", "broken", "budget", "law"),
    [
        # A worker frees blocks although a running step names them.
        (EngineCache, "begin_step", lambda cache, sequences: None, Budget(cancels=1), "use after free"),
        # Nobody who waits for a prefix in flight is woken.
        (parking, "wake", lambda state, now: None, Budget(), "everything can end"),
    ],
)
def test_what_is_broken_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, broken: Any, budget: Budget, law: str
) -> None:
    """The search names the law and tells the shortest way to where it does not hold. tests/mutants has more mistakes."""
    monkeypatch.setattr(kind, name, broken)
    start = Start(SHARED, budget).begin()
    found = Search(start).run()
    assert law in found.broken
    assert 0 < len(tell(start, found.trace)) <= 20
