"""Runs the audits of Check: one at a time, in slices between other calls, shared by the calls that wait."""

from __future__ import annotations

import asyncio

from .core.integrity import Audit
from .core.manager import CacheManager


class Audits:
    """Runs the audits that calls ask for.

    A call gets an audit that began after the call arrived: all calls that arrive during an audit share the next one. An audit that
    no call waits for is cancelled.
    """

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        self.num_audits = 0
        """Audits that are complete."""
        self.num_violations = 0
        """Violations that the complete audits found."""
        self.num_violations_of_last = 0
        """Violations that the last complete audit found."""
        self._running: asyncio.Task[Audit] | None = None
        self._next: _Shared | None = None

    async def run(self) -> Audit:
        """Wait for an audit that begins now, or after the one that is running, and return its result."""
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
            self.num_violations_of_last = len(result.violations)
            return result
        finally:
            audit.close()
            if self._running is asyncio.current_task():
                self._running = None


class _Shared:
    """A planned audit, and how many calls wait for it."""

    def __init__(self, task: asyncio.Task[Audit]) -> None:
        self.task = task
        self.num_waiting = 0
