"""Foreign epochs: a worker has seen an epoch of another life of the manager, as large as ours or larger.

The worker may hold blocks with generations larger than those that we would grant, because our state file is lost or is an old copy.
Either our epoch is raised above the one that it has seen, and it keeps its blocks; or it drops them and registers without state.
The first serves honest workers after such a loss. The second limits the effect of a message, since any peer can claim any epoch.
"""

from __future__ import annotations

from typing import Final

from .election.epoch import MAX_FOREIGN_EPOCH

MAX_RAISE: Final = 1 << 16
"""Most that all messages together may raise the epoch in one life of the manager."""


class ForeignEpochs:
    """Decides whether our epoch may be raised: once in a life or, without a state file, once per lease, because workers may have
    seen several epochs then. Reads no clock and writes nothing."""

    def __init__(self, epoch: int, *, found_state: bool, lease_seconds: float) -> None:
        """`epoch` is the one that this life began with; `found_state` says whether it continues that of a state file."""
        self._highest = min(epoch + MAX_RAISE, MAX_FOREIGN_EPOCH)
        self._pause_seconds = None if found_state else lease_seconds
        self._raised_at: float | None = None

    def may_outgrow(self, seen: int, now: float) -> bool:
        """Whether our epoch may become `seen` + 1."""
        if seen >= self._highest:
            return False
        if self._raised_at is None:
            return True
        return self._pause_seconds is not None and now - self._raised_at >= self._pause_seconds

    def on_raised(self, now: float) -> None:
        """Note that our epoch was raised."""
        self._raised_at = now
