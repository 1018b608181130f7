"""The calls that a worker makes to the manager in the course of a trace: recorded once, replayed for timing.

Tokens are not recorded: they are the trace's own, by request, first position and count.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench.trace import Trace


class RecordedItem(NamedTuple):
    """One sequence's part of a call."""

    request: int
    """Which request of the trace."""
    round: int
    start: int
    num_tokens: int
    """Tokens stated are start … start + num_tokens − 1 of the request."""
    num_computed: int = 0
    bound: tuple[tuple[int, int, int], ...] = ()
    """(table index, block, generation)."""
    max_new_tokens: int = 0
    no_wait: bool = False


class RecordedCall(NamedTuple):
    """One mutating call."""

    kind: str
    """allocate, append or free."""
    call_no: int
    downlink_ack: int
    reserve_wish: int | None
    returned: tuple[tuple[int, int], ...]
    """(block, generation) of surplus given back."""
    items: tuple[RecordedItem, ...]


@dataclass(slots=True)
class Recording:
    """All calls of one trace, and what came of them."""

    trace: Trace
    calls: list[RecordedCall] = field(default_factory=list)
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_waits: int = 0
    """Allocations answered "wait": the prefix was being computed."""
    num_reserve_waits: int = 0
    """Decodes that had to wait for a call."""
    num_preemptions: int = 0

    def num_calls(self, kind: str) -> int:
        """Calls of one kind."""
        return sum(call.kind == kind for call in self.calls)

    def num_items(self, kind: str) -> int:
        """Sequences in all calls of one kind."""
        return sum(len(call.items) for call in self.calls if call.kind == kind)

    def save(self, path: Path) -> None:
        """Write to a file, for `load` in a process of ours."""
        path.write_bytes(pickle.dumps(self))

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote."""
        recording = pickle.loads(path.read_bytes())
        assert isinstance(recording, Recording)
        return recording
