"""Which ends of a child are final: one that dies is started again, one that takes its leave may go."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from .supervisor import ChildExit, ChildSpec, Supervisor

MAX_DEATHS: Final = 5
DEATHS_WINDOW_SECONDS: Final = 60.0
"""A child that dies so often within so long would go on dying."""
_FIRST_PAUSE_SECONDS: Final = 0.2


class GaveUp(Exception):
    """A child dies again and again."""


class Keeper:
    """Keeps children alive. `vital` is the one that may not go either: without it the others are nothing."""

    def __init__(
        self,
        supervisor: Supervisor,
        children: Mapping[str, ChildSpec],
        vital: str,
        on_event: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._children = dict(children)
        self._vital = vital
        self._on_event = on_event
        self._clock = clock
        self._deaths: dict[str, deque[float]] = {name: deque(maxlen=MAX_DEATHS) for name in children}

    async def keep(self) -> None:
        """Until all but the vital one have taken their leave. Raises GaveUp. May be cancelled."""
        while set(self._children) - {self._vital}:
            ended = await self._supervisor.wait_for_exit()
            if ended.status == 0 and ended.name != self._vital:
                self._on_event(f"{ended.name} has left")
                del self._children[ended.name]
            else:
                await self._start_again(ended)

    async def _start_again(self, ended: ChildExit) -> None:
        deaths = self._deaths[ended.name]
        now = self._clock()
        deaths.append(now)
        recent = [death for death in deaths if now - death < DEATHS_WINDOW_SECONDS]
        if len(recent) == MAX_DEATHS:
            raise GaveUp(f"{ended}, the {MAX_DEATHS}th time within {DEATHS_WINDOW_SECONDS:g} s; its log above says why")
        self._on_event(f"{ended}; starting it again")
        await asyncio.sleep(_FIRST_PAUSE_SECONDS * 2 ** (len(recent) - 1))
        await self._supervisor.start(self._children[ended.name])
