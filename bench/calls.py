"""A worker's calls to the manager during a trace: recorded once, replayed for timing.

Tokens are not recorded: they follow from the trace, by request, first position and count.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.trace import Trace


class RecordedItem(NamedTuple):
    """One sequence's part of a call."""

    request: int
    """Index of the request in the trace."""
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
    """All calls of one trace, and their results."""

    trace: Trace
    calls: list[RecordedCall] = field(default_factory=list)
    num_steps: int = 0
    num_cached_tokens: int = 0
    num_waits: int = 0
    """Allocations answered with a wait, because the prefix was being computed."""
    num_reserve_waits: int = 0
    """Decodes that waited for a call."""
    num_preemptions: int = 0

    def num_calls(self, kind: str) -> int:
        """Calls of one kind."""
        return sum(call.kind == kind for call in self.calls)

    def num_items(self, kind: str) -> int:
        """Sequences in all calls of one kind."""
        return sum(len(call.items) for call in self.calls if call.kind == kind)

    def save(self, path: Path) -> None:
        """Write to a JSON file, for `load`."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        content["trace"] = Trace(**content["trace"])
        content["calls"] = [_call(*fields) for fields in content["calls"]]
        return Recording(**content)


def _call(
    kind: str, call_no: int, downlink_ack: int, wish: int | None, returned: list[list[int]], items: list[list[Any]]
) -> RecordedCall:
    """A call from JSON, which has lists for tuples."""
    blocks = tuple((block, generation) for block, generation in returned)
    return RecordedCall(kind, call_no, downlink_ack, wish, blocks, tuple(_item(*fields) for fields in items))


def _item(
    request: int, round_: int, start: int, tokens: int, computed: int, bound: list[list[int]], new: int, no_wait: bool
) -> RecordedItem:
    entries = tuple((index, block, generation) for index, block, generation in bound)
    return RecordedItem(request, round_, start, tokens, computed, entries, new, no_wait)
