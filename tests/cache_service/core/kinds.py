"""What sequences and sessions have in groups of one kind, for tests that are about that kind."""

from __future__ import annotations

from kvpool.cache_service.core.groups.unit import UnitSessionGroup
from kvpool.cache_service.core.groups.unit_pool import UnitPool
from kvpool.cache_service.core.groups.window import WindowTable
from kvpool.cache_service.core.sequence import Sequence
from kvpool.cache_service.core.session import Session


def windows(sequence: Sequence) -> list[WindowTable | None]:
    """By group, None for those without a window."""
    return [table if isinstance(table, WindowTable) else None for table in sequence.tables]


def tables(sequence: Sequence) -> list[list[int]]:
    """By group, empty in those with a window."""
    return [[] if isinstance(table, WindowTable) else table for table in sequence.tables]


def unit_pool(session: Session) -> UnitPool | None:
    """Of the group with cross attention, if there is one."""
    return next((group.pool for group in session.groups if isinstance(group, UnitSessionGroup)), None)
