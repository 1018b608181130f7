"""A sequence's blocks in a group with a window: the window itself, and the blocks that are free to be written next.

Three kinds of blocks:

* *placed*: the KV of a block of tokens is in it, or is written by the running step. It has no name: when its tokens have left the
  window, it is free again.
* *free*: of the ring, without a place.
* *named*: part of a window that ends at a boundary. It is sealed, others may have it too, and it is never written again: when its
  tokens have left the window, the sequence releases it.

Placed and free blocks are the sequence's scratch: the manager knows which they are, but not where.

The ring is turned between steps only, so no unfinished step has a block that is written again. It always has the blocks that the
sequence can still need, whatever is named: a window is named only if the reserve can replace its blocks. So decoding never waits
for a group with a window.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .entry import Entry
from .reserve import ReservedBlock


class Statement(NamedTuple):
    """What a call states of a ring. Everything is stated again until a call is executed."""

    bound: tuple[Entry, ...] = ()
    scratch: tuple[ReservedBlock, ...] = ()
    released: tuple[Entry, ...] = ()


class Ring:
    """One sequence in one group. All counts are blocks."""

    def __init__(self, span: int, block_size: int, hits: Iterable[Entry], scratch: Iterable[ReservedBlock]) -> None:
        self.span = span
        self._block_size = block_size
        self.named = {entry.table_index: ReservedBlock(entry.block, entry.generation) for entry in hits}
        self.placed: dict[int, ReservedBlock] = {}
        self.free = list(scratch)
        last = max(self.named, default=-1)
        self.table = [0] * (last + 1)
        """Block ids from position 0; 0 where the tokens have left the window."""
        for index, reserved in self.named.items():
            self.table[index] = reserved.block
        self._first = min(self.named, default=last + 1)
        """Of the entries that are not 0."""
        self._bound: dict[Entry, None] = {}
        self._scratch: dict[ReservedBlock, None] = {}
        self._released: dict[Entry, None] = {}
        self._to_drop: list[int] = []
        """Released blocks that this worker has not stopped using: the call that states it is not sent yet."""
        self._from_reserve: dict[ReservedBlock, None] = {}
        """Blocks that the manager may still count as reserved."""

    def __repr__(self) -> str:
        return f"<Ring named={sorted(self.named)} placed={sorted(self.placed)} free={len(self.free)}>"

    # -- steps

    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[ReservedBlock] = ()) -> None:
        """Turn the ring, and place a block for each index up to `num_slots` positions. No step may use the sequence. `spare`: as
        many blocks of the reserve as `num_missing` says."""
        for reserved in spare:
            self._add(reserved)
        self._turn(num_computed_tokens)
        for index in range(len(self.table), -(-num_slots // self._block_size)):
            reserved = self.free.pop()
            self.placed[index] = reserved
            self.table.append(reserved.block)

    def num_missing(self, num_computed_tokens: int, num_slots: int) -> int:
        """How many blocks `advance` needs beyond those of the ring; 0 as long as no step is larger than the ring is made for."""
        first_kept = self._first_kept(num_computed_tokens)
        num_turned = sum(index < first_kept for index in self.placed)
        return max(0, -(-num_slots // self._block_size) - len(self.table) - len(self.free) - num_turned)

    def _first_kept(self, num_computed_tokens: int) -> int:
        # From the block that is being filled, not from the next token: the window that ends where that block begins stays whole
        # until the next one begins, and can be named until then.
        return num_computed_tokens // self._block_size - self.span

    def _turn(self, num_computed_tokens: int) -> None:
        for index in range(self._first, min(self._first_kept(num_computed_tokens), len(self.table))):
            self.table[index] = 0
            if (placed := self.placed.pop(index, None)) is not None:
                self.free.append(placed)
            elif (named := self.named.pop(index, None)) is not None:
                self._release(Entry(index, *named))
            self._first = index + 1

    def _add(self, reserved: ReservedBlock) -> None:
        self.free.append(reserved)
        self._scratch[reserved] = self._from_reserve[reserved] = None

    def _release(self, entry: Entry) -> None:
        self._released[entry] = None
        self._to_drop.append(entry.block)

    # -- boundaries

    def window(self, boundary: int) -> range:
        """Table indexes of the window that ends before this one."""
        return range(max(0, boundary - self.span), boundary)

    def has_window(self, boundary: int) -> bool:
        """Whether all of that window's blocks are still there."""
        return all(index in self.placed or index in self.named for index in self.window(boundary))

    def num_to_replace(self, boundary: int, num_needed: int) -> int:
        """Blocks of the reserve that the ring needs, once the window is named, to have `num_needed` placed and free ones."""
        num_lost = sum(index not in self.named for index in self.window(boundary))
        return max(0, num_needed - (len(self.placed) + len(self.free) - num_lost))

    def name(self, boundary: int, replacements: Iterable[ReservedBlock] = ()) -> list[Entry]:
        """Give the window's blocks their names; returns those that had none. `replacements` go into the ring."""
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

    def give_back(self, num_needed: int) -> None:
        """Release free blocks beyond `num_needed` placed and free ones."""
        surplus = len(self.placed) + len(self.free) - num_needed
        for _ in range(min(surplus, len(self.free))):
            self._release(Entry(0, *self.free.pop()))

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
        """Size of the statement."""
        return len(self._bound) + len(self._scratch) + len(self._released)

    def state(self) -> tuple[Statement, list[int]]:
        """What the next call states, and the blocks that this worker stops using with it."""
        dropped, self._to_drop = self._to_drop, []
        return Statement(tuple(self._bound), tuple(self._scratch), tuple(self._released)), dropped

    def acknowledge(self, stated: Statement) -> None:
        """A call that stated this was executed."""
        for entry in stated.bound:
            self._bound.pop(entry, None)
            self._from_reserve.pop(ReservedBlock(entry.block, entry.generation), None)
        for reserved in stated.scratch:
            self._scratch.pop(reserved, None)
            self._from_reserve.pop(reserved, None)
        for entry in stated.released:
            self._released.pop(entry, None)
            self._from_reserve.pop(ReservedBlock(entry.block, entry.generation), None)

    def acknowledge_all(self) -> list[int]:
        """A report states the present; returns the blocks that this worker stops using with it."""
        self._bound, self._scratch, self._released, self._from_reserve = {}, {}, {}, {}
        dropped, self._to_drop = self._to_drop, []
        return dropped

    def scratch(self) -> list[ReservedBlock]:
        """Placed and free blocks."""
        return [*self.placed.values(), *self.free]

    def blocks(self) -> list[int]:
        """All blocks that this worker uses for the sequence, those that its pool may evict first in front."""
        named = [self.named[index].block for index in sorted(self.named, reverse=True)]
        return [*(reserved.block for reserved in self.scratch()), *named, *self._to_drop]
