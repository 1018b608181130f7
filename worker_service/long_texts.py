"""The line of long texts: one at a time is tokenised, the tenants take turns, and what waits is bounded.

A request is judged by the engine's queue only once its tokens are counted. So without bounds here a peer that sends text after text
would make the worker keep all of them, and every other text would wait for them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from .engine.errors import EngineError, ErrorKind

MAX_WAITING_CHARS: Final = 64 << 20
"""Characters of all texts that wait together; one text of any length may always wait."""
RETRY_SECONDS: Final = 1.0

Result = TypeVar("Result")


class _Waiting(NamedTuple):
    num_chars: int
    turn: asyncio.Future[None]


class LongTexts:
    """The line of long texts of one event loop."""

    def __init__(self, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        self._max_waiting_chars = max_waiting_chars
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self._is_busy = False
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Waiting texts of each tenant, oldest first; the tenant whose turn is next comes first."""

    async def run(self, tenant: str, num_chars: int, work: Callable[[], Result]) -> Result:
        """Do the work for a text in a thread when its turn comes. Raises EngineError, also of the kind BUSY: too much waits."""
        if self._is_busy:
            await self._wait(tenant, num_chars)
        self._is_busy = True
        # A caller that goes away does not end the thread's work.
        working = asyncio.get_running_loop().run_in_executor(self._thread, work)
        working.add_done_callback(self._on_done)
        return await asyncio.shield(working)

    async def _wait(self, tenant: str, num_chars: int) -> None:
        self._make_room(tenant, num_chars)
        waiting = _Waiting(num_chars, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.cancelled():
                self._forget(tenant, waiting)
            elif waiting.turn.exception() is None:
                self._next()  # its turn had just come
            raise

    def _chars(self, tenant: str) -> int:
        return sum(waiting.num_chars for waiting in self._waiting.get(tenant, ()))

    def _make_room(self, tenant: str, num_chars: int) -> None:
        """Displace the newest texts of the tenant with the most, as long as it keeps at least what this one will have. Raises
        EngineError."""
        while self._waiting and sum(map(self._chars, self._waiting)) + num_chars > self._max_waiting_chars:
            most = max(self._waiting, key=self._chars)
            newest = self._waiting[most][-1]
            if most == tenant or self._chars(most) - newest.num_chars < self._chars(tenant) + num_chars:
                raise _busy()
            self._forget(most, newest)
            newest.turn.set_exception(_busy())

    def _forget(self, tenant: str, waiting: _Waiting) -> None:
        self._waiting[tenant].remove(waiting)
        if not self._waiting[tenant]:
            del self._waiting[tenant]

    def _on_done(self, working: asyncio.Future[Result]) -> None:
        if not working.cancelled():
            working.exception()  # of one that nobody waits for any more
        self._next()

    def _next(self) -> None:
        """Give the turn to the oldest text of the next tenant."""
        self._is_busy = bool(self._waiting)
        if self._waiting:
            tenant, texts = next(iter(self._waiting.items()))
            waiting = texts[0]
            self._forget(tenant, waiting)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            waiting.turn.set_result(None)


def _busy() -> EngineError:
    return EngineError(
        ErrorKind.BUSY,
        "too many long texts wait to be tokenised: ask again, ask another worker, or send token_ids",
        retry_seconds=RETRY_SECONDS,
    )
