"""Blocks of a sequence in a group that keeps only recent KV: a window's ring, or a running state.

Three kinds of blocks:

* *placed*: something that ends with a block of tokens is in it, or is written by the running step. It has no name.
* *free*: it belongs to the sequence, without a place.
* *named*: part of what the sequence keeps for others at a boundary. It is sealed, others may have it too, and it is never written
  again: when the sequence itself needs it no more, it releases it.

Unnamed blocks are the sequence's scratch: the manager knows their ids, but not their content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from .entry import Entry
from .reserve import SpareBlock


class Statement(NamedTuple):
    """What a call states of a sequence's scratch in one group. Everything is stated again until a call is executed."""

    bound: tuple[Entry, ...] = ()
    scratch: tuple[SpareBlock, ...] = ()
    released: tuple[Entry, ...] = ()


class ForkedScratch(NamedTuple):
    """What a fork has in one group."""

    scratch: Scratch
    copies: list[tuple[int, int]]
    """(source, target) of each copy to make: a block of the parent, and the block of the fork that gets its content."""


class Scratch(ABC):
    """The blocks of one sequence in one group. All counts are blocks; boundaries are counted in blocks of tokens too."""

    def __init__(self, span: int, block_size: int, hits: Iterable[Entry], scratch: Iterable[SpareBlock]) -> None:
        self.span = span
        """Blocks before a boundary that are kept for others."""
        self._block_size = block_size
        self.named = {entry.table_index: SpareBlock(entry.block, entry.generation) for entry in hits}
        self.placed: dict[int, SpareBlock] = {}
        self.free = list(scratch)
        self.table: list[int] = []
        """Block ids from position 0, for layers that attend; 0 where nothing is kept."""
        self._bound: dict[Entry, None] = {}
        self._scratch: dict[SpareBlock, None] = {}
        self._released: dict[Entry, None] = {}
        self._to_drop: list[int] = []
        """Released blocks that this worker has not stopped using: the call that states it is not sent yet."""
        self._from_reserve: dict[SpareBlock, None] = {}
        """Blocks that the manager may still count as reserved."""

    # -- steps

    @abstractmethod
    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        """Prepare the blocks for a step that computes up to `num_slots` tokens. No step may use the sequence. `spare`: blocks of
        the reserve, as many as `num_missing` says and, if there are more, `num_useful`."""

    @abstractmethod
    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        """Blocks of the reserve without which there can be no such step."""

    def num_useful(self, num_computed_tokens: int, num_slots: int) -> int:
        """Blocks of the reserve that the step can use in addition, so that others can go on from there."""
        return 0

    @abstractmethod
    def settle(self, num_to_come: int) -> None:
        """The prompt is computed, and so many blocks of tokens can follow: release what only the prompt needed."""

    @abstractmethod
    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        """Blocks of the reserve that `fork` needs."""

    @abstractmethod
    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> ForkedScratch:
        """The scratch of a fork of the sequence, which no step may use, where so many tokens are computed. Nothing is shared: it is
        made of `spare`, as many blocks of the reserve as `num_for_fork` says."""

    @property
    def from_reserve(self) -> list[SpareBlock]:
        """Blocks that the manager may still count as reserved. Of a fork that it does not know they are all."""
        return list(self._from_reserve)

    def _add(self, reserved: SpareBlock) -> None:
        self.free.append(reserved)
        self._scratch[reserved] = self._from_reserve[reserved] = None

    def _release(self, entry: Entry) -> None:
        self._released[entry] = None
        self._to_drop.append(entry.block)

    def _release_named(self, index: int) -> None:
        self._release(Entry(index, *self.named.pop(index)))

    # -- boundaries

    def window(self, boundary: int) -> range:
        """Table indexes of what is kept for others at a boundary."""
        return range(max(0, boundary - self.span), boundary)

    def has_window(self, boundary: int) -> bool:
        """Whether all of these blocks are still there."""
        return all(index in self.placed or index in self.named for index in self.window(boundary))

    @abstractmethod
    def num_to_replace(self, boundary: int, num_to_come: int, *, is_prompt_done: bool) -> int:
        """Blocks of the reserve that must take the place of those that are named at a boundary, after which so many blocks of
        tokens can follow."""

    @abstractmethod
    def num_lacking(self, boundary: int | None, num_to_come: int, *, is_prompt_done: bool) -> int:
        """Blocks that should be in the reserve for the next boundary, after which so many blocks of tokens can follow; None: no
        boundary comes before the end of the text, which is `num_to_come` blocks away."""

    def name(self, boundary: int, replacements: Iterable[SpareBlock] = ()) -> list[Entry]:
        """Give the blocks at a boundary their names; returns those that had none. `replacements` become scratch."""
        entries = []
        for index in self.window(boundary):
            reserved = self.placed.pop(index, None)
            if reserved is not None:
                self.named[index] = reserved
                entries.append(Entry(index, *reserved))
                # Not scratch any more: stated as what it is now.
                self._scratch.pop(reserved, None)
        self._bound.update(dict.fromkeys(entries))
        for reserved in replacements:
            self._add(reserved)
        return entries

    # -- what the manager knows

    @property
    def has_news(self) -> bool:
        """Whether a call has something to state."""
        return bool(self._bound or self._scratch or self._released)

    @property
    def num_unstated(self) -> int:
        """Blocks of the reserve that the manager may still count as reserved."""
        return len(self._from_reserve)

    @property
    def num_entries_of_news(self) -> int:
        """Entries of the next statement."""
        return len(self._bound) + len(self._scratch) + len(self._released)

    def has_to_release(self, copied: Container[int]) -> bool:
        """Whether the next call can release blocks, with the same argument as `state`."""
        return any(entry.block not in copied for entry in self._released)

    def state(self, copied: Container[int] = ()) -> tuple[Statement, list[int]]:
        """What the next call states, and the blocks that this worker stops using with it. `copied`: blocks that a step has yet to
        copy for a fork, which are not released before."""
        dropped = [block for block in self._to_drop if block not in copied]
        self._to_drop = [block for block in self._to_drop if block in copied]
        released = tuple([entry for entry in self._released if entry.block not in copied])
        return Statement(tuple(self._bound), tuple(self._scratch), released), dropped

    def acknowledge(self, stated: Statement) -> None:
        """Note that a call that stated this was executed."""
        for entry in stated.bound:
            self._bound.pop(entry, None)
            self._from_reserve.pop(SpareBlock(entry.block, entry.generation), None)
        for reserved in stated.scratch:
            self._scratch.pop(reserved, None)
            self._from_reserve.pop(reserved, None)
        for entry in stated.released:
            self._released.pop(entry, None)
            self._from_reserve.pop(SpareBlock(entry.block, entry.generation), None)

    def acknowledge_all(self) -> list[int]:
        """Count everything as acknowledged, since a report states the present; returns the blocks that this worker stops using with
        it."""
        self._bound, self._scratch, self._released, self._from_reserve = {}, {}, {}, {}
        dropped, self._to_drop = self._to_drop, []
        return dropped

    def scratch(self) -> list[SpareBlock]:
        """The blocks that are not named."""
        return [*self.placed.values(), *self.free]

    def blocks(self) -> list[int]:
        """All blocks that this worker uses for the sequence, those that its pool may evict first in front."""
        named = [self.named[index].block for index in sorted(self.named, reverse=True)]
        return [*(reserved.block for reserved in self.scratch()), *named, *self._to_drop]
