"""A worker that registers with state, and reports what a test says."""

from __future__ import annotations

import itertools

from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Registration, ReportPart, Uplink
from kvpool.cache_service.core.session import Session


class BaseReporter:
    """Registers as `introduction` says, with state; after each report every law of the manager is checked."""

    def __init__(self, manager: CacheManager, introduction: Registration, now: float = 0.0) -> None:
        self.manager = manager
        self.number = self.manager.register(introduction._replace(holds_state=True), now).session
        self.call_no = itertools.count(1)

    @property
    def session(self) -> Session:
        return next(session for session in self.manager.sessions if session.number == self.number)

    def uplink(self) -> Uplink:
        return Uplink(self.number, next(self.call_no))

    def report(self, part: int = 0, *, last: bool = True, **content: object) -> None:
        self.manager.report(self.uplink(), ReportPart(part, last, **content))  # type: ignore[arg-type]
        self.check()

    def check(self) -> None:
        while self.manager.sweep():
            pass
        assert self.manager.check().violations == []
