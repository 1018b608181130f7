"""Breadth first through all that can happen, level by level, each state once, with every law checked in each.

A state that was reached before with a budget that covers the present one is not gone through again: whatever can happen from here
could happen from there. So `num_states` counts states, and `num_visits` the times that one was gone through because it was reached
with a budget that none before covered. A level is gone through when all of it is known, so the counts do not depend on which of
several ways into a state comes first.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.exhaustive.engine import BrokenLaw
from tests.exhaustive.fingerprint import fingerprint_of, forms_of
from tests.exhaustive.parts import for_reading, number_classes
from tests.exhaustive.world import SPEAKING, Budget, Event, State, World

_OF_FATE = frozenset({"lose", "double", "give up", "restart the manager", "expire", "crash", "cancel", "move"})
"""Events that need not happen for a run to end."""
_VISITS_PER_COLLECTION = 500


def freeze(world: World) -> State:
    """The world as it is, from which `World.thaw` makes copies."""
    return world.freeze(forms_of(world))


class Reached(NamedTuple):
    """A state, with what is left of the budget, that is to be gone through."""

    state: State
    before: int
    """The visit it was reached from; -1: none."""
    event: Event | None
    """What happened then."""


@dataclass
class Found:
    """What a search has come to."""

    num_states: int = 0
    num_visits: int = 0
    num_transitions: int = 0
    num_ends: int = 0
    """States in which all is over and nothing is held."""
    depth: int = 0
    num_waiting: int = 0
    """Visits of the level that comes next."""
    seconds: float = 0.0
    """Of the processor's time."""
    is_complete: bool = False
    kinds: Counter[str] = field(default_factory=Counter)
    """How often what has happened."""
    broken: str = ""
    """The first law that did not hold."""
    trace: list[Event] = field(default_factory=list)
    """How to get there."""


class Search:
    """One world and all that can become of it. `max_states`: give up at the end of the level that goes beyond."""

    def __init__(self, start: World, *, max_states: int = 10_000_000) -> None:
        self._start = start
        self._max_states = max_states
        self.found = Found()
        self._known: dict[bytes, list[Budget]] = {}
        """By fingerprint the budgets with which a state was gone through."""
        self._next: dict[bytes, list[Reached]] = {}
        """The level to come."""
        self._ways: list[tuple[int, Event | None]] = []
        """How each visit was come to: the visit before, and what happened then."""
        # What may be expected to happen, whatever the budget, between the first 64 bits of fingerprints. That any two states of a
        # million have these in common is as likely as 3 in 100 million, and nothing but the way to the end hangs on them.
        self._states, self._visits = array("Q"), array("q")
        """The states, and the first visit of each."""
        self._ends, self._edges = array("Q"), array("Q")
        """Of the edges the ends in turn: the second follows the first."""

    def run(self, on_progress: Callable[[Found], None] | None = None) -> Found:
        """Go through all of it, or up to the first broken law. `on_progress` is told of every level."""
        found, began = self.found, time.process_time()
        self.reach(self._start)
        while self._next and found.num_states <= self._max_states and not found.broken:
            self.go_on()
            found.depth += found.num_waiting > 0
            found.seconds = time.process_time() - began
            if on_progress is not None:
                on_progress(found)
        if not self._next and not found.broken:
            stuck = self._stuck()
            if stuck:
                found.broken = f"everything can end: from {len(stuck)} states it cannot"
                found.trace = self._way_to(stuck[0])
            found.is_complete = not stuck
        return found

    def reach(self, world: World, before: int = -1, event: Event | None = None) -> bytes:
        """Plan to go through it, if it is news; returns its fingerprint."""
        forms = forms_of(world)
        mark, left = fingerprint_of(world, forms), world.left
        if any(budget.covers(left) for budget in self._known.get(mark, ())):
            return mark
        planned = self._next.get(mark, [])
        if not any(other.state.left.covers(left) for other in planned):
            others = [other for other in planned if not left.covers(other.state.left)]
            self._next[mark] = [*others, Reached(world.freeze(forms), before, event)]
        return mark

    def go_on(self) -> None:
        """Go through the next level."""
        was_enabled = gc.isenabled()
        gc.disable()  # managers are cycles by the thousand; the copies are dropped all at once
        try:
            level, self._next = self._next, {}
            new = {mark for mark in level if mark not in self._known}
            for mark, visits in level.items():
                self._known.setdefault(mark, []).extend([reached.state.left for reached in visits])
            while level:
                mark, visits = level.popitem()
                is_new = mark in new
                for reached in visits:
                    self._visit(mark, reached, is_new)
                    is_new = False
        finally:
            if was_enabled:
                gc.enable()
        self.found.num_waiting = sum(map(len, self._next.values()))

    def _visit(self, mark: bytes, reached: Reached, is_new: bool) -> None:
        found, visit = self.found, len(self._ways)
        self._ways.append((reached.before, reached.event))
        found.num_visits += 1
        if found.num_visits % _VISITS_PER_COLLECTION == 0:
            for_reading.cache_clear()
            gc.collect(0)
        world = World.thaw(reached.state)
        node = int.from_bytes(mark[:8], "little")
        if is_new:
            found.num_states += 1
            self._states.append(node)
            self._visits.append(visit)
            if world.is_over:
                found.num_ends += 1
                self._ends.append(node)
            try:
                world.require_laws()
            except BrokenLaw as broken:
                self._break(str(broken), self._way_to(visit))
        if found.broken:
            return  # all that is left to find is a law that was broken one event earlier
        silent: set[tuple[str, int]] = set()
        for event in world.events():
            if event.how and (event.what, event.at) in silent:
                continue  # there is no call that a mishap could befall
            after = World.thaw(reached.state)
            name = name_of(after, event)
            try:
                after.apply(event)
            except Exception as error:
                says = str(error) if isinstance(error, BrokenLaw) else f"{type(error).__name__}: {error}"
                self._break(says, [*self._way_to(visit), event])
                return
            if event.what in SPEAKING and not after.has_called:
                silent.add((event.what, event.at))
            found.num_transitions += 1
            found.kinds[name] += 1
            reached_mark = self.reach(after, visit, event)
            if is_new and event.what not in _OF_FATE and not event.how and reached_mark != mark:
                self._edges.append(node)
                self._edges.append(int.from_bytes(reached_mark[:8], "little"))

    def _break(self, says: str, trace: list[Event]) -> None:
        found = self.found
        if not found.broken or len(trace) < len(found.trace):
            found.broken, found.trace = says, trace

    def _way_to(self, visit: int) -> list[Event]:
        way: list[Event] = []
        while visit >= 0:
            visit, event = self._ways[visit]
            if event is not None:
                way.append(event)
        return way[::-1]

    def _stuck(self) -> list[int]:
        """Visits of states from which the run cannot end, with nothing held, although nothing further goes wrong and nobody helps.
        Those that were come to first, first. There should be none."""
        states = np.array(self._states, np.uint64)
        order = np.argsort(states)
        states, visits = states[order], np.array(self._visits, np.int64)[order]
        edges = np.searchsorted(states, np.array(self._edges, np.uint64).reshape(-1, 2))
        can_end = np.zeros(len(states), dtype=bool)
        can_end[np.searchsorted(states, np.array(self._ends, np.uint64))] = True
        while True:
            more = can_end[edges[:, 1]] & ~can_end[edges[:, 0]]
            if not more.any():
                break
            can_end[edges[more, 0]] = True
        return [int(visit) for visit in np.sort(visits[~can_end])]


def name_of(world: World, event: Event) -> str:
    """What happens, for the statistics."""
    if event.what in ("deliver", "lose", "double", "give up"):
        letter = world.wire[event.at]
        return f"{event.what} {letter.method}{' answer' if letter.is_reply else ''}"
    return f"{event.what}, {event.how}" if event.how else event.what


def tell(start: World, trace: list[Event]) -> list[str]:
    """The trace in words, one line for each event."""
    world = World.thaw(freeze(start))
    lines: list[str] = []
    for event in trace:
        name = name_of(world, event)
        where = event.at
        if event.what in ("deliver", "lose", "double", "give up"):
            letter = world.wire[event.at]
            where = letter.worker
            name += f" (call {letter.call}{', ' + letter.refusal if letter.refusal else ''})"
        if event.what in ("ask", "move", "go on elsewhere", "cancel", "close the old stream"):
            who = f"client, {world.wanted[where].name}"
        elif event.what in ("restart the manager", "sweep"):
            who = "manager"
        else:
            who = f"w{where}"
        before = len(world.wire)
        try:
            world.apply(event)
        except Exception as error:
            lines.append(f"{who}: {name} → {error}")
            break
        said = ", ".join(letter.method for letter in world.wire[before:] if not letter.is_reply)
        lines.append(f"{who}: {name}" + (f" → {said}" if said else "") + f"   {_where(world)}")
    return lines


def _where(world: World) -> str:
    """The manager's tables, and the workers'."""
    books = [
        f"{session.worker_id}: {session.pools[0].counts().free} free, {session.pools[0].counts().cached} cached, "
        f"{session.pools[0].num_reserved} reserved, tables { {key[0]: s.tables for key, s in session.sequences.items()} }"
        for session in world.manager.sessions
        if session.sequences or session.pools[0].num_reserved or session.pools[0].counts().cached
    ]
    return "; ".join(books)


number_classes()  # all that a world is made of is imported by now
