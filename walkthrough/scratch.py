"""The blocks of one sequence in a group with a window or a state, as the worker of a walkthrough manages them.

The manager knows the ids of these blocks, but not their content until they are named. A block is *placed* while it has the content
for one index of the table, *free* while it may be written, and *named* once it is an entry that others can hit. The real ones
are in worker_service/cache/ring.py and running_state.py, which a walkthrough of the manager does not import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvpool.cache_service.core.groups.window import span
from kvpool.cache_service.core.messages import GroupSpec, ReservedBlock, TableEntry

from .layouts import BLOCK_SIZE


class Named(NamedTuple):
    """The fields of an Append for a window or snapshot that was named."""

    entries: tuple[TableEntry, ...]
    replacements: tuple[ReservedBlock, ...]
    """Blocks out of the reserve that are scratch from now on."""


class Scratch:
    """The blocks of one sequence in one such group."""

    def __init__(self, group: GroupSpec, hits: Mapping[int, ReservedBlock], scratch: Iterable[ReservedBlock]) -> None:
        self._group = group
        self._span = span(group, BLOCK_SIZE)
        self._named = dict(hits)
        self._placed: dict[int, ReservedBlock] = {}
        self._free = list(scratch)
        self._released: list[TableEntry] = []

    def advance(self, begin: int, end: int) -> None:
        """Compute the tokens begin … end − 1 of the sequence in one step."""
        raise NotImplementedError

    def name(self, boundary: int, num_to_come: int, spare: list[ReservedBlock], *, is_prompt_done: bool) -> Named:
        """Name the window or snapshot that ends at `boundary`, in tokens. Scratch blocks that the sequence then lacks are taken out
        of `spare`; if that has too few, nothing is named. `num_to_come`: blocks of tokens after the boundary."""
        end = boundary // BLOCK_SIZE
        indexes = [index for index in range(max(0, end - self._span), end) if index in self._placed]
        num_needed = self._num_needed(num_to_come, is_prompt_done=is_prompt_done)
        num_missing = max(0, num_needed - (self._num_scratch - len(indexes)))
        if num_missing > len(spare):
            return Named((), ())
        replacements = tuple(spare.pop(0) for _ in range(num_missing))
        self._free += replacements
        self._named |= (placed := {index: self._placed.pop(index) for index in indexes})
        return Named(tuple(TableEntry(index, *reserved) for index, reserved in placed.items()), replacements)

    def settle(self, num_to_come: int) -> None:
        """Release the scratch that only the prompt needed, now that it is computed."""
        num_needed = self._num_needed(num_to_come + len(self._placed), is_prompt_done=True)
        while self._free and self._num_scratch > num_needed:
            self._released.append(TableEntry(0, *self._free.pop()))

    def take_released(self) -> tuple[TableEntry, ...]:
        """Return the entries that the sequence has stopped using since the last call."""
        released, self._released = tuple(self._released), []
        return released

    @property
    def _num_scratch(self) -> int:
        return len(self._placed) + len(self._free)

    def _num_needed(self, num_to_come: int, *, is_prompt_done: bool) -> int:
        raise NotImplementedError

    def _release_named(self, index: int) -> None:
        self._released.append(TableEntry(index, *self._named.pop(index)))


class Ring(Scratch):
    """A window's ring: a block whose tokens no later token sees is written again."""

    def advance(self, begin: int, end: int) -> None:
        first_seen = begin // BLOCK_SIZE - self._span
        for index in [index for index in self._placed if index < first_seen]:
            self._free.append(self._placed.pop(index))
        for index in [index for index in self._named if index < first_seen]:
            self._release_named(index)
        for index in range(begin // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            if index not in self._placed:
                self._placed[index] = self._free.pop(0)

    def _num_needed(self, num_to_come: int, *, is_prompt_done: bool) -> int:
        # A step of a single token needs the window and the block that it fills.
        return min(num_to_come, self._span + 1 if is_prompt_done else self._group.scratch_blocks)


class RunningState(Scratch):
    """A recurrent state. Every step overwrites it, and a step that ends on the grid leaves a copy."""

    def __init__(self, group: GroupSpec, hits: Mapping[int, ReservedBlock], scratch: Iterable[ReservedBlock]) -> None:
        super().__init__(group, hits, scratch)
        self._running = self._free.pop(0)

    def advance(self, begin: int, end: int) -> None:
        for index in [index for index in self._named if (index + 1) * BLOCK_SIZE <= begin]:
            self._release_named(index)  # this step has read it
        if end % (self._group.grid_blocks * BLOCK_SIZE) == 0:
            self._free += self._placed.values()
            self._placed = {end // BLOCK_SIZE - 1: self._free.pop(0)} if self._free else {}

    def _num_needed(self, num_to_come: int, *, is_prompt_done: bool) -> int:
        return 1 if num_to_come >= self._group.grid_blocks else 0

    def settle(self, num_to_come: int) -> None:
        """Release nothing: a state needs as much as before."""
