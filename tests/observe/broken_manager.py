"""`python -m tests.observe.broken_manager FLAGS…`: a manager with mistakes.

SIGUSR1: its accounts of each worker are one block short. SIGUSR2: every audit raises.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from kvpool.cache_service.__main__ import main as manager_main
from kvpool.cache_service.core.integrity import Audit
from kvpool.cache_service.core.manager import CacheManager


def main() -> int:
    """Run the manager; returns its exit status."""
    managers: list[CacheManager] = []
    make = CacheManager.__init__

    def make_and_keep(self: CacheManager, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        managers.append(self)

    def miscount(*_: object) -> None:
        for manager in managers:
            for session in manager.sessions:
                session.account.add_blocks(-1)

    def fail(self: CacheManager) -> Audit:
        raise RuntimeError("a mistake that a test has made")

    def break_audits(*_: object) -> None:
        CacheManager.begin_audit = fail  # type: ignore[method-assign, assignment]

    CacheManager.__init__ = make_and_keep  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, miscount)
    signal.signal(signal.SIGUSR2, break_audits)
    return manager_main()


if __name__ == "__main__":
    sys.exit(main())
