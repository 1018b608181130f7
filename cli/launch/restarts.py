"""Restarts children: one that dies is started again, one that ends with status 0 has left.

A worker that dies repeatedly does not end the others: the pauses before its restarts grow, as long as another one runs well.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from .children import ChildExit, Children, ChildSpec

MAX_DEATHS: Final = 5
DEATHS_WINDOW_SECONDS: Final = 60.0
"""A child that dies MAX_DEATHS times within this time is failing. It has recovered when it has run for this time."""
_FIRST_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 60.0


class GaveUp(Exception):
    """The vital child is failing, or all others are."""


class _Child:
    """Starts and deaths of one child."""

    def __init__(self, spec: ChildSpec, now: float) -> None:
        self.spec = spec
        self._started_at: float | None = now
        """Time of its last start; None: it is dead."""
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._num_tries = 0
        """Starts since it last ran well."""
        self._has_failed = False

    def is_failing(self, now: float) -> bool:
        """Whether it has died too often and has not recovered."""
        return self._has_failed and not self._is_well(now)

    def _is_well(self, now: float) -> bool:
        return self._started_at is not None and now - self._started_at >= DEATHS_WINDOW_SECONDS

    def on_start(self, now: float) -> None:
        """Note that it was started again."""
        self._started_at = now

    def on_death(self, now: float) -> None:
        """Note that it has ended."""
        if self._is_well(now):
            self._has_failed = False
        self._started_at = None
        self._deaths.append(now)
        num_recent = sum(now - death < DEATHS_WINDOW_SECONDS for death in self._deaths)
        self._has_failed = self._has_failed or num_recent == MAX_DEATHS
        self._num_tries = self._num_tries + 1 if self._has_failed else num_recent

    def pause_seconds(self) -> float:
        """Return the pause before it is started again."""
        doublings = min(self._num_tries - 1, 20)
        return min(_FIRST_PAUSE_SECONDS * float(2**doublings), _LONGEST_PAUSE_SECONDS)


class Restarts:
    """Restarts children when they die. The others need the `vital` child: it is restarted after status 0 too."""

    def __init__(
        self,
        children: Children,
        specs: Mapping[str, ChildSpec],
        vital: str,
        on_event: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        kept: Collection[str] = (),
    ) -> None:
        """`kept` are children that the others do not need. They are restarted whatever their exit status, and do not keep the
        others running."""
        self._kept = frozenset(kept)
        self._processes = children
        now = clock()
        self._children = {name: _Child(spec, now) for name, spec in specs.items()}
        self._vital = vital
        self._on_event = on_event
        self._clock = clock
        self._restarts: dict[asyncio.Task[None], str] = {}
        """Pending restarts, each with the child's name."""

    async def keep(self) -> None:
        """Run until all but the vital child have left. Raises GaveUp. May be cancelled."""
        try:
            while set(self._children) - {self._vital} - self._kept:
                ended = await self._next_exit()
                if ended is None:
                    continue
                if ended.status == 0 and ended.name != self._vital and ended.name not in self._kept:
                    self._on_event(f"{ended.name} has left")
                    del self._children[ended.name]
                    self._require_one_well(f"{ended.name} has left, and the others fail")
                else:
                    self._on_death(ended)
        finally:
            for restart in self._restarts:
                restart.cancel()
            await asyncio.gather(*self._restarts, return_exceptions=True)

    async def _next_exit(self) -> ChildExit | None:
        """Wait for the next child that ends; None after a restart, because the new process has to be watched too."""
        waits: set[asyncio.Task[ChildExit]] = set()
        if len(self._restarts) < len(self._children):
            waits.add(asyncio.create_task(self._processes.wait_for_exit()))
        try:
            await asyncio.wait({*waits, *self._restarts}, return_when=asyncio.FIRST_COMPLETED)
            for restart in [restart for restart in self._restarts if restart.done()]:
                del self._restarts[restart]
                restart.result()
            return next((wait.result() for wait in waits if wait.done()), None)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _on_death(self, ended: ChildExit) -> None:
        child = self._children[ended.name]
        now = self._clock()
        child.on_death(now)
        pause = child.pause_seconds()
        if child.is_failing(now):
            why = f"{ended}, the {MAX_DEATHS}th time within {DEATHS_WINDOW_SECONDS:g} s; its log above says why"
            if ended.name == self._vital:
                raise GaveUp(why)
            if ended.name not in self._kept:
                self._require_one_well(why)
            self._on_event(f"{ended}; its log above says why. It dies repeatedly: next start in {pause:.0f} s")
        else:
            self._on_event(f"{ended}; starting it again")
        self._restarts[asyncio.create_task(self._start_again(child, pause))] = ended.name

    def _require_one_well(self, why: str) -> None:
        """Raise GaveUp if all children but the vital one are failing."""
        now = self._clock()
        others = [child for name, child in self._children.items() if name != self._vital and name not in self._kept]
        if others and all(child.is_failing(now) for child in others):
            raise GaveUp(why)

    async def _start_again(self, child: _Child, pause_seconds: float) -> None:
        await asyncio.sleep(pause_seconds)
        await self._processes.start(child.spec)
        child.on_start(self._clock())
        name = child.spec.name
        self._on_event(f"{name} was started again (pid {self._processes.pids()[name]})")
