"""Breadth first through all that can happen, level by level, each state once, with every law checked in each.

A state that was reached before with a budget that covers the present one is not gone through again: whatever can happen from here
could happen from there. So `num_states` counts states, and `num_visits` the times that one was gone through because it was reached
with a budget that none before covered. A level is gone through when all of it is known, so the counts do not depend on which of
several ways into a state comes first, nor on how many processes share the work (`share.py`, `crew.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.exhaustive.crew import Crew
from tests.exhaustive.fingerprint import forms_of
from tests.exhaustive.share import Graph, Level, Reached, begin_share, name_of, pack
from tests.exhaustive.world import Event, State, World


def freeze(world: World) -> State:
    """The world as it is, from which `World.thaw` makes copies."""
    return world.freeze(forms_of(world))


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
    """On the processors, of all processes together."""
    elapsed_seconds: float = 0.0
    """By the clock."""
    is_complete: bool = False
    kinds: Counter[str] = field(default_factory=Counter)
    """How often what has happened."""
    broken: str = ""
    """The first law that did not hold."""
    trace: list[Event] = field(default_factory=list)
    """How to get there."""


class Search:
    """One world and all that can become of it. `max_states`: give up at the end of the level that goes beyond."""

    def __init__(self, start: World, *, max_states: int = 10_000_000, num_processes: int = 1) -> None:
        self._start = start
        self._max_states = max_states
        self._num_processes = num_processes

    def run(self, on_progress: Callable[[Found], None] | None = None) -> Found:
        """Go through all of it, or up to the first broken law. `on_progress` is told of every level."""
        found = Found()
        began = time.perf_counter()
        with Crew(begin_share, self._num_processes) as crew:
            self._run(crew, found, began, on_progress)
        found.elapsed_seconds = time.perf_counter() - began
        return found

    def _run(self, crew: Crew, found: Found, began: float, on_progress: Callable[[Found], None] | None) -> None:
        boxes = [[pack([Reached.at_start(freeze(self._start))])]] * self._num_processes
        found.num_waiting = sum(crew.ask_each("take", [(some,) for some in boxes]))
        while found.num_waiting and found.num_states <= self._max_states:
            levels: list[Level] = crew.ask_each("go_on", [(found.depth,)] * self._num_processes)
            _add_up(found, levels)
            broken = [level.broken for level in levels if level.broken is not None]
            if broken:
                first = min(broken, key=lambda one: (one.num_events, one.says))
                found.broken, found.trace = first.says, _way_to(crew, first.visit)
                found.trace += [] if first.event is None else [first.event]
                return
            boxes = [[level.outboxes[to] for level in levels] for to in range(self._num_processes)]
            found.num_waiting = sum(crew.ask_each("take", [(some,) for some in boxes]))
            found.depth += found.num_waiting > 0
            found.elapsed_seconds = time.perf_counter() - began
            if on_progress is not None:
                on_progress(found)
        graphs: list[Graph] = crew.ask_each("graph", [()] * self._num_processes)
        for graph in graphs:
            found.kinds += graph.kinds
        if not found.num_waiting:
            stuck = _stuck(graphs)
            if stuck:
                found.broken = f"everything can end: from {len(stuck)} states it cannot"
                found.trace = _way_to(crew, stuck[0])
            found.is_complete = not found.broken


def _add_up(found: Found, levels: list[Level]) -> None:
    found.num_states = sum(level.num_states for level in levels)
    found.num_visits = sum(level.num_visits for level in levels)
    found.num_transitions = sum(level.num_transitions for level in levels)
    found.num_ends = sum(level.num_ends for level in levels)
    found.seconds = sum(level.seconds for level in levels)


def _way_to(crew: Crew, visit: int) -> list[Event]:
    way: list[Event] = []
    while visit >= 0:
        visit, event = crew.ask(visit % crew.size, "way_to", visit)
        if event is not None:
            way.append(event)
    return way[::-1]


def _stuck(graphs: list[Graph]) -> list[int]:
    """Visits of states from which the run cannot end, with nothing held, although nothing further goes wrong and nobody helps.
    Those that were come to first, first. There should be none."""
    states = np.concatenate([graph.states for graph in graphs])
    order = np.argsort(states)
    states, visits = states[order], np.concatenate([graph.visits for graph in graphs])[order]
    edges = np.searchsorted(states, np.concatenate([graph.edges for graph in graphs]))
    can_end = np.zeros(len(states), dtype=bool)
    can_end[np.searchsorted(states, np.concatenate([graph.ends for graph in graphs]))] = True
    while True:
        more = can_end[edges[:, 1]] & ~can_end[edges[:, 0]]
        if not more.any():
            break
        can_end[edges[more, 0]] = True
    return [int(visit) for visit in np.sort(visits[~can_end])]


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
