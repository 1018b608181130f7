"""Breadth first through all that can happen, each state once, with every law checked in each.

A state that was reached before with a budget that covers the present one is not gone through again: whatever can happen from here
could happen from there. So `num_states` counts states, and `num_visits` the times that one was gone through because it was reached
with a budget that none before covered.
"""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvpool.v1 import cache_pb2, common_pb2

from cache_service.core.messages import Limits
from tests.exhaustive.engine import BrokenLaw
from tests.exhaustive.fingerprint import fingerprint
from tests.exhaustive.world import Budget, Event, World
from worker_service.cache.settings import CacheSettings

_OF_FATE = frozenset({"lose", "double", "give up", "restart the manager", "expire", "crash", "cancel", "move", "beat"})
"""Events that need not happen for a run to end."""

_constants: list[Any] = [Limits()]


def _constant(index: int) -> Any:
    return _constants[index]


def _as_constant(value: Any) -> tuple[Any, tuple[int]]:
    """Copies of a world share what never changes."""
    try:
        index = _constants.index(value)
    except ValueError:
        _constants.append(value)
        index = len(_constants) - 1
    return _constant, (index,)


def _parse(kind: Any, data: bytes) -> Any:
    return kind.FromString(data)


def _as_bytes(message: Any) -> tuple[Any, tuple[Any, bytes]]:
    return _parse, (type(message), message.SerializeToString())


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()


for _kind in (Limits, CacheSettings, common_pb2.Root, Budget):
    _Pickler.dispatch_table[_kind] = _as_constant
for _message in (cache_pb2.AllocateRequest, cache_pb2.AppendRequest, cache_pb2.FreeRequest, cache_pb2.ReportRequest):
    _Pickler.dispatch_table[_message] = _as_bytes


def freeze(world: World) -> bytes:
    """The world as bytes, from which `thaw` makes copies."""
    into = io.BytesIO()
    _Pickler(into, 5).dump(world)
    return into.getvalue()


def thaw(data: bytes) -> World:
    """A copy of a frozen world."""
    world: World = pickle.loads(data)
    return world


@dataclass
class Found:
    """What a search has come to."""

    num_states: int = 0
    num_visits: int = 0
    num_transitions: int = 0
    num_ends: int = 0
    """States in which all is over and nothing is held."""
    depth: int = 0
    seconds: float = 0.0
    """On the processor."""
    is_complete: bool = False
    kinds: Counter[str] = field(default_factory=Counter)
    """How often what has happened."""
    broken: str = ""
    """The first law that did not hold."""
    trace: list[Event] = field(default_factory=list)
    """How to get there."""


class Search:
    """One world and all that can become of it. `max_states`: give up beyond."""

    def __init__(self, start: World, *, max_states: int = 10_000_000) -> None:
        self._start = start
        self._max_states = max_states
        self._visits: list[tuple[int, Event | None]] = []
        """How each visit was come to: the visit before, and what happened then."""
        self._known: dict[bytes, list[tuple[Budget, int]]] = {}
        """Visits by fingerprint."""
        self._edges = array("I")
        """Pairs of visits, of which the second follows the first by what may be expected to happen."""
        self._ends: list[int] = []

    def run(self, on_progress: Callable[[Found], None] | None = None) -> Found:
        """Go through all of it, or up to the first broken law."""
        found = Found()
        began = time.process_time()
        was_enabled = gc.isenabled()
        gc.disable()  # worlds are cycles by the thousand; they are dropped whole, generation by generation, below
        try:
            self._run(found, began, on_progress)
        finally:
            if was_enabled:
                gc.enable()
        found.seconds = time.process_time() - began
        return found

    def _run(self, found: Found, began: float, on_progress: Callable[[Found], None] | None) -> None:
        queue: deque[tuple[int, int, bytes]] = deque()
        self._enter(self._start, -1, None, 0, queue, found)
        while queue and not found.broken:
            visit, depth, data = queue.popleft()
            found.depth = depth
            world = thaw(data)
            events = world.events()
            for event in events:
                after = world if event is events[-1] else thaw(data)
                name = _name(after, event)
                try:
                    after.apply(event)
                except BrokenLaw as broken:
                    found.broken, found.trace = str(broken), [*self._way_to(visit), event]
                    return
                except Exception as error:
                    found.broken, found.trace = f"{type(error).__name__}: {error}", [*self._way_to(visit), event]
                    return
                found.num_transitions += 1
                found.kinds[name] += 1
                reached = self._enter(after, visit, event, depth + 1, queue, found)
                if found.broken:
                    return
                if event.what not in _OF_FATE and not event.how and reached != visit:
                    self._edges.append(visit)
                    self._edges.append(reached)
            if visit % 1000 == 0:
                gc.collect(1)
                if on_progress is not None:
                    found.seconds = time.process_time() - began
                    on_progress(found)
            if found.num_states > self._max_states:
                return
        self._require_ends(found)
        found.is_complete = not found.broken

    def _enter(
        self,
        world: World,
        before: int,
        event: Event | None,
        depth: int,
        queue: deque[tuple[int, int, bytes]],
        found: Found,
    ) -> int:
        """Look whether this is new, and check it if it is; returns the visit that stands for it."""
        known = self._known.setdefault(fingerprint(world), [])
        for budget, visit in known:
            if budget.covers(world.left):
                return visit
        visit = len(self._visits)
        self._visits.append((before, event))
        found.num_visits += 1
        if not known:
            found.num_states += 1
            try:
                world.require_laws()
            except BrokenLaw as broken:
                found.broken, found.trace = str(broken), self._way_to(visit)
                return visit
        if world.is_over:
            found.num_ends += not known
            self._ends.append(visit)
        known.append((world.left, visit))
        queue.append((visit, depth, freeze(world)))
        return visit

    def _way_to(self, visit: int) -> list[Event]:
        way: list[Event] = []
        while visit >= 0:
            visit, event = self._visits[visit]
            if event is not None:
                way.append(event)
        return way[::-1]

    def _require_ends(self, found: Found) -> None:
        """From every state the run can end, with nothing held, although nothing further goes wrong and nobody helps."""
        edges = (
            np.frombuffer(self._edges, dtype=np.uint32).reshape(-1, 2) if self._edges else np.zeros((0, 2), np.uint32)
        )
        can_end = np.zeros(len(self._visits), dtype=bool)
        can_end[self._ends] = True
        while True:
            more = can_end[edges[:, 1]] & ~can_end[edges[:, 0]]
            if not more.any():
                break
            can_end[edges[more, 0]] = True
        stuck = np.flatnonzero(~can_end)
        if len(stuck):
            found.broken = f"everything can end: from {len(stuck)} states it cannot"
            found.trace = self._way_to(int(stuck[0]))


def _name(world: World, event: Event) -> str:
    """What happens, for the statistics."""
    if event.what in ("deliver", "lose", "double", "give up"):
        letter = world.wire[event.at]
        return f"{event.what} {letter.method}{' answer' if letter.is_reply else ''}"
    return f"{event.what}, {event.how}" if event.how else event.what


def tell(start: World, trace: list[Event]) -> list[str]:
    """The trace in words, one line for each event."""
    world = thaw(freeze(start))
    lines: list[str] = []
    for event in trace:
        name = _name(world, event)
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
        f"{session.worker_id}: {session.pool.counts().free} free, {session.pool.counts().cached} cached, "
        f"{session.pool.num_reserved} reserved, tables { {key[0]: s.table for key, s in session.sequences.items()} }"
        for session in world.manager.sessions
        if session.sequences or session.pool.num_reserved or session.pool.counts().cached
    ]
    return "; ".join(books)
