"""Windows and states: what a sequence has of a group whose layers see its last `window` tokens only, or are recurrent.

Such a group has no dense block table. What a sequence still needs is in its *scratch* blocks, a ring or a running state that the
worker writes by itself: to the manager they have no place and no content. *Named* are only the blocks of windows that end at a
*boundary* of the sequence, from where other prompts can go on: they are sealed, and stay hits after the sequence has released them.

A *snapshot* of a state is, for the manager, a window of one block: a hit of m blocks needs the one at index m − 1. Snapshots are
possible at multiples of the worker's *grid* only, so all boundaries of a sequence that has a state are on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from typing import Protocol

from .messages import Group


def span(group: Group, block_size: int) -> int:
    """Blocks of a group before a boundary that the next token needs, and so a hit. 0: all of them."""
    if group.grid_blocks:
        return 1
    return -(-(group.window - 1) // block_size) if group.window else 0


class WindowTable:
    """The blocks of one sequence in one group with a window or a state."""

    __slots__ = ("ends", "entries", "scratch", "span")

    def __init__(self, span: int, entries: dict[int, int], scratch: Iterable[int]) -> None:
        self.span = span
        self.entries = entries
        """Named blocks by table index. All of them are sealed."""
        self.scratch = dict.fromkeys(scratch)
        """Blocks that the worker writes as it likes, oldest grant first. No other sequence has them."""
        self.ends: set[int] = set()
        """Where windows end that the sequence has named itself, as far as their blocks are in `entries`."""

    def __repr__(self) -> str:
        return f"<WindowTable {self.entries} scratch={list(self.scratch)}>"

    def __len__(self) -> int:
        """Blocks that it holds."""
        return len(self.entries) + len(self.scratch)

    def blocks(self) -> list[int]:
        """All of them, the last window last to be evicted: the end of the text is where a conversation goes on."""
        return [*self.scratch, *self.entries.values()]

    def is_worth_keeping(self, index: int, nodes: List[Parting], kept: KeptBoundaries) -> bool:
        """Whether a window that an entry belongs to may be hit again after the sequence has gone on: the sequence has named it, as
        at the end of its prompt; or prompts part where it ends; or somebody has asked for it. Any other one was hit by the
        sequence, and lies on the way to later windows, which serve all that it could serve."""
        return any(
            last + 1 in self.ends or last + 1 in kept or nodes[last].is_junction
            for last in range(index, min(index + self.span, len(nodes)))
        )


class KeptBoundaries:
    """Boundaries, in blocks, that somebody has asked for: some, and the multiples of an interval, if that is not 0."""

    __slots__ = ("_interval", "_some")

    def __init__(self, some: Iterable[int] = (), interval: int = 0) -> None:
        self._some = frozenset(some)
        self._interval = interval

    def __contains__(self, boundary: int) -> bool:
        return boundary in self._some or bool(self._interval and boundary % self._interval == 0)

    def between(self, first: int, last: int) -> Iterator[int]:
        """Those of first … last: the single ones, in order, then the multiples."""
        yield from sorted(boundary for boundary in self._some if first <= boundary <= last)
        if self._interval:
            yield from range(-(-first // self._interval) * self._interval, last + 1, self._interval)


NONE_KEPT = KeptBoundaries()


class Parting(Protocol):
    """A node of the prefix tree."""

    @property
    def is_junction(self) -> bool:
        """Whether more than one prompt goes on from it."""
