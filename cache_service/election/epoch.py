"""The epoch, a number that is larger in every life of the manager, and the interface of the stores that keep it.

All stamps of the manager (sessions, generations) begin with the epoch. They are unique for ever because the epoch never repeats: it
is durable before it is used, and only the process that leads uses it.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

MAX_EPOCH = (1 << 24) - 1
"""Largest epoch: stamps are 64 bits, of which the counter takes 40."""

MAX_FOREIGN_EPOCH = MAX_EPOCH >> 1
"""Largest epoch that a worker's message may raise ours to. The upper half is left for new lives of the manager."""


class StateError(Exception):
    """The store of the epoch cannot be used; the message says why and what to do."""


class LeadershipLost(Exception):
    """Another process may lead now, so this one must end. The message says why."""


class EpochStore(Protocol):
    """Keeps the epoch, and lets at most one process at a time lead."""

    epoch: int
    """Epoch of this life, which is durable; 0 as long as this process stands by."""
    found_state: bool
    """Whether the store had the epoch of an earlier life."""

    async def lead(self) -> None:
        """Wait until no other process leads, then lead, under an epoch larger than any before. Raises StateError."""

    def leads(self) -> bool:
        """Whether no other process can lead at this moment. It is asked at every call, so it must cost nothing."""

    async def keep(self) -> NoReturn:
        """Keep leading until cancelled. Raises LeadershipLost early enough for this process to end before another one leads."""

    async def raise_above(self, epoch: int) -> int:
        """Make the epoch larger than `epoch`, which a worker has seen, and return it. Idempotent.

        Raises StateError if it cannot be made durable; the epoch is then what it was, or what this method would have made it.
        Raises LeadershipLost if another process leads.
        """

    async def release(self) -> None:
        """End this life, so that another process may lead at once. Idempotent; raises nothing."""
