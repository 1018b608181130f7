"""Check's audits: one at a time, in slices between other calls, shared by all who wait for the same one."""

from __future__ import annotations

import asyncio

from .core.integrity import Audit
from .core.manager import CacheManager


class Audits:
    """Runs the audits that calls ask for.

    Whoever asks gets one that began after it asked: while one is under way, all who come wait for the next, and share it. One
    that nobody waits for any more is given up.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self.num_audits = 0
        """Audits that came to their end."""
        self.num_violations = 0
        """Broken laws that they found."""
        self._running: asyncio.Task[Audit] | None = None
        self._next: _Shared | None = None

    async def run(self) -> Audit:
        """The result of an audit that begins now or when the one that is under way has ended."""
        if self._next is None:
            self._next = _Shared(asyncio.create_task(self._audit(self._running), name="manager-audit"))
        shared = self._next
        shared.num_waiting += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if not shared.num_waiting:
                shared.task.cancel()
                if self._next is shared:
                    self._next = None

    async def _audit(self, before: asyncio.Task[Audit] | None) -> Audit:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = asyncio.current_task(), None
        audit = self._manager.begin_audit()
        try:
            more = audit.step()
            while more:
                await asyncio.sleep(0)  # calls that have arrived meanwhile
                more = audit.step()
            result = audit.result()
            self.num_audits += 1
            self.num_violations += len(result.violations)
            return result
        finally:
            audit.close()
            if self._running is asyncio.current_task():
                self._running = None


class _Shared:
    """An audit that has not begun, and how many calls wait for it."""

    def __init__(self, task: asyncio.Task[Audit]) -> None:
        self.task = task
        self.num_waiting = 0
