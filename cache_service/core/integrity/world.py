"""The objects that an audit checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from typing import NamedTuple

from ..budget import Budget
from ..copies import Holder
from ..fencing import Fencing
from ..prefix_tree import PrefixTree
from ..session import Session


class World(NamedTuple):
    """The manager's own objects, not copies."""

    tree: PrefixTree
    attempts: Fencing
    budget: Budget
    sessions: Mapping[int, Session]
    """Live ones, by number."""
    retired: List[Session]
    """Those that are not swept yet."""
    last_generation: Callable[[], int]

    def all_sessions(self) -> list[Session]:
        """Live ones and retired ones, as of now."""
        return [*self.sessions.values(), *self.retired]

    def session_of(self, holder: Holder) -> Session | None:
        """The session that a holder belongs to, if there is one."""
        among = self.retired if holder.retired else self.sessions.values()
        return next((session for session in among if session.holder is holder), None)
