"""A share of the states of a world, those with certain fingerprints. It goes through them, and finds what belongs to others."""

from __future__ import annotations

import gc
import pickle
import time
from array import array
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from tests.exhaustive.engine import BrokenLaw
from tests.exhaustive.fingerprint import fingerprint_of, forms_of
from tests.exhaustive.parts import for_reading
from tests.exhaustive.world import SPEAKING, Budget, Event, State, World

_OF_FATE = frozenset({"lose", "double", "give up", "restart the manager", "expire", "crash", "cancel", "move", "beat"})
"""Events that need not happen for a run to end."""
_VISITS_PER_COLLECTION = 500


class Reached(NamedTuple):
    """A state, with what is left of the budget, on its way to the share that it belongs to."""

    mark: bytes
    """Its fingerprint."""
    state: State
    before: int
    """The visit it was reached from; -1: none."""
    event: Event | None
    """What happened then."""

    @staticmethod
    def at_start(state: State) -> Reached:
        """That from which all begins."""
        world = World.thaw(state)
        return Reached(fingerprint_of(world, forms_of(world)), state, -1, None)


class Broken(NamedTuple):
    """A law that did not hold."""

    num_events: int
    """From the start up to it."""
    says: str
    visit: int
    event: Event | None
    """What happened to the state of that visit; None: it was broken already."""


class Level(NamedTuple):
    """What a share has done so far, and what it has found for the others in the level it has just gone through."""

    num_states: int
    num_visits: int
    num_transitions: int
    num_ends: int
    seconds: float
    """On the processor."""
    broken: Broken | None
    outboxes: list[bytes]
    """For each share, packed."""


class Graph(NamedTuple):
    """What may be expected to happen, whatever the budget, between the first 64 bits of fingerprints. That any two states of a
    million have these in common is as likely as 3 in 100 million, and nothing but the way to the end hangs on them."""

    states: np.ndarray[Any, np.dtype[np.uint64]]
    visits: np.ndarray[Any, np.dtype[np.int64]]
    """The first of each state."""
    ends: np.ndarray[Any, np.dtype[np.uint64]]
    edges: np.ndarray[Any, np.dtype[np.uint64]]
    """(n, 2): the second follows the first."""
    kinds: Counter[str]


def pack(box: list[Reached]) -> bytes:
    """As bytes, each part once."""
    return pickle.dumps(box, 5) if box else b""


def begin_share(index: int, size: int) -> Share:
    return Share(index, size)


class Share:
    """The states whose fingerprints are `index` modulo `size`."""

    def __init__(self, index: int, size: int) -> None:
        self._index = index
        self._size = size
        self._known: dict[bytes, list[Budget]] = {}
        """By fingerprint the budgets with which a state was gone through; of a state of another share, those it was sent with."""
        self._next: dict[bytes, list[Reached]] = {}
        """The level to come."""
        self._ways: list[tuple[int, Event | None]] = []
        """How each visit was come to: the visit before, and what happened then. A visit's number is its place here times `size`,
        plus `index`."""
        self._states, self._visits = array("Q"), array("q")
        self._ends, self._edges = array("Q"), array("Q")
        self._num_transitions = 0
        self._kinds: Counter[str] = Counter()
        self._broken: Broken | None = None
        self._began = time.process_time()

    def take(self, boxes: list[bytes]) -> int:
        """Take in what was found for it; returns how many visits the next level has."""
        for box in boxes:
            for reached in pickle.loads(box) if box else ():
                if self._owner(reached.mark) == self._index and self._is_news(reached.mark, reached.state.left):
                    self._plan(reached)
        return sum(map(len, self._next.values()))

    def go_on(self, depth: int) -> Level:
        """Go through the next level, which lies `depth` events behind the start."""
        was_enabled = gc.isenabled()
        gc.disable()  # managers are cycles by the thousand; the copies are dropped all at once
        try:
            outboxes: list[list[Reached]] = [[] for _ in range(self._size)]
            level, self._next = self._next, {}
            new = {mark for mark in level if mark not in self._known}
            for mark, visits in level.items():
                self._known.setdefault(mark, []).extend([reached.state.left for reached in visits])
            while level:
                mark, visits = level.popitem()
                is_new = mark in new
                for reached in visits:
                    self._visit(reached, depth, is_new, outboxes)
                    is_new = False
        finally:
            if was_enabled:
                gc.enable()
        return Level(
            len(self._states),
            len(self._ways),
            self._num_transitions,
            len(self._ends),
            time.process_time() - self._began,
            self._broken,
            [pack(box) for box in outboxes],
        )

    def way_to(self, visit: int) -> tuple[int, Event | None]:
        return self._ways[visit // self._size]

    def graph(self) -> Graph:
        return Graph(
            np.array(self._states, np.uint64),
            np.array(self._visits, np.int64),
            np.array(self._ends, np.uint64),
            np.array(self._edges, np.uint64).reshape(-1, 2),
            self._kinds,
        )

    def _owner(self, mark: bytes) -> int:
        return mark[-1] % self._size

    def _is_news(self, mark: bytes, left: Budget) -> bool:
        for budget in self._known.get(mark, ()):
            if budget.covers(left):
                return False
        return not any(planned.state.left.covers(left) for planned in self._next.get(mark, ()))

    def _plan(self, reached: Reached) -> None:
        """It belongs to the level to come, instead of what it covers."""
        planned = self._next.get(reached.mark, [])
        left = reached.state.left
        self._next[reached.mark] = [*[other for other in planned if not left.covers(other.state.left)], reached]

    def _visit(self, reached: Reached, depth: int, is_new: bool, outboxes: list[list[Reached]]) -> None:
        visit = len(self._ways) * self._size + self._index
        self._ways.append((reached.before, reached.event))
        if len(self._ways) % _VISITS_PER_COLLECTION == 0:
            for_reading.cache_clear()
            gc.collect(0)
        world = World.thaw(reached.state)
        node = int.from_bytes(reached.mark[:8], "little")
        if is_new:
            self._states.append(node)
            self._visits.append(visit)
            if world.is_over:
                self._ends.append(node)
            try:
                world.require_laws()
            except BrokenLaw as broken:
                self._break(Broken(depth, str(broken), visit, None))
        if self._broken is not None:
            return  # all that is left to find is a law that was broken one event earlier
        silent: set[tuple[str, int]] = set()
        for event in world.events():
            if event.how and (event.what, event.at) in silent:
                continue  # there is no call that a mishap could befall
            after = World.thaw(reached.state)
            name = name_of(after, event)
            try:
                after.apply(event)
            except BrokenLaw as broken:
                self._break(Broken(depth + 1, str(broken), visit, event))
                return
            except Exception as error:
                self._break(Broken(depth + 1, f"{type(error).__name__}: {error}", visit, event))
                return
            if event.what in SPEAKING and not after.has_called:
                silent.add((event.what, event.at))
            self._num_transitions += 1
            self._kinds[name] += 1
            mark = self._reach(after, visit, event, outboxes)
            if is_new and event.what not in _OF_FATE and not event.how and mark != reached.mark:
                self._edges.append(node)
                self._edges.append(int.from_bytes(mark[:8], "little"))

    def _reach(self, world: World, before: int, event: Event, outboxes: list[list[Reached]]) -> bytes:
        """Plan it, or send it where it belongs, if it is news; returns its fingerprint."""
        forms = forms_of(world)
        mark = fingerprint_of(world, forms)
        if self._is_news(mark, world.left):
            reached = Reached(mark, world.freeze(forms), before, event)
            owner = self._owner(mark)
            if owner == self._index:
                self._plan(reached)
            else:
                self._known.setdefault(mark, []).append(world.left)
                outboxes[owner].append(reached)
        return mark

    def _break(self, broken: Broken) -> None:
        if self._broken is None or broken.num_events < self._broken.num_events:
            self._broken = broken


def name_of(world: World, event: Event) -> str:
    """What happens, for the statistics."""
    if event.what in ("deliver", "lose", "double", "give up"):
        letter = world.wire[event.at]
        return f"{event.what} {letter.method}{' answer' if letter.is_reply else ''}"
    return f"{event.what}, {event.how}" if event.how else event.what
