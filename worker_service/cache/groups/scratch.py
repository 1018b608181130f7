"""Blocks of a sequence in a group that keeps only recent KV: a window's ring, or a running state.

Three kinds of blocks:

* *placed*: something that ends with a block of tokens is in it, or is written by the running step. It has no name.
* *free*: it belongs to the sequence, without a place.
* *named*: part of what the sequence keeps for others at a boundary. It is sealed, others may have it too, and it is never written
  again: when the sequence itself needs it no more, it releases it.

Unnamed blocks are the sequence's scratch: the manager knows their ids, but not their content.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable
from typing import ClassVar

from kvpool.v1 import cache_pb2, common_pb2

from ..entry import Entry
from ..ledger import BlockLedger, Content
from ..reserve import SpareBlock
from .group import Group, GroupGrant, GroupTable, Run, Sizes, Statement, Text, disagree_about


class Scratch(GroupTable):
    """The blocks of one sequence in one group that keeps boundaries. A fork of it shares nothing."""

    keeps_boundaries = True
    is_useful_only: ClassVar[bool] = False
    """Whether it may lack what should be named at a boundary, so that a hit is lost."""

    def __init__(self, span: int, block_size: int, hits: Iterable[Entry], scratch: Iterable[SpareBlock]) -> None:
        super().__init__()
        self.span = span
        """Blocks before a boundary that are kept for others."""
        self._block_size = block_size
        self.named = {entry.table_index: SpareBlock(entry.block, entry.generation) for entry in hits}
        self.placed: dict[int, SpareBlock] = {}
        self.free = list(scratch)
        self._bound: dict[Entry, None] = {}
        self._scratch: dict[SpareBlock, None] = {}
        self._released: dict[Entry, None] = {}
        self._to_drop: list[int] = []
        """Released blocks that this worker has not stopped using: the call that states it is not sent yet."""
        self._from_reserve: dict[SpareBlock, None] = {}
        """Blocks that the manager may still count as reserved."""

    @property
    def from_reserve(self) -> list[SpareBlock]:
        return list(self._from_reserve)

    def _add(self, reserved: SpareBlock) -> None:
        self.free.append(reserved)
        self._scratch[reserved] = self._from_reserve[reserved] = None

    def _release(self, entry: Entry) -> None:
        self._released[entry] = None
        self._to_drop.append(entry.block)

    def _release_named(self, index: int) -> None:
        self._release(Entry(index, *self.named.pop(index)))

    @abstractmethod
    def settle(self, num_to_come: int) -> None:
        """The prompt is computed, and so many blocks of tokens can follow: release what only the prompt needed."""

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
        return bool(self._bound or self._scratch or self._released)

    @property
    def num_unstated(self) -> int:
        return len(self._from_reserve)

    @property
    def num_entries_of_news(self) -> int:
        return len(self._bound) + len(self._scratch) + len(self._released)

    def has_to_release(self, copied: Container[int]) -> bool:
        return any(entry.block not in copied for entry in self._released)

    def state(self, copied: Container[int] = ()) -> tuple[Statement, list[int]]:
        dropped = [block for block in self._to_drop if block not in copied]
        self._to_drop = [block for block in self._to_drop if block in copied]
        released = tuple([entry for entry in self._released if entry.block not in copied])
        return Statement(tuple(self._bound), tuple(self._scratch), released), dropped

    def acknowledge(self, stated: Statement) -> None:
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
        self._bound, self._scratch, self._released, self._from_reserve = {}, {}, {}, {}
        dropped, self._to_drop = self._to_drop, []
        return dropped

    def scratch(self) -> list[SpareBlock]:
        return [*self.placed.values(), *self.free]

    def blocks(self) -> list[int]:
        named = [self.named[index].block for index in sorted(self.named, reverse=True)]
        return [*(reserved.block for reserved in self.scratch()), *named, *self._to_drop]

    def entries(self) -> list[Entry]:
        return [Entry(index, *reserved) for index, reserved in sorted(self.named.items())]


class ScratchGroup(Group):
    """A group in which sequences have scratch blocks."""

    @abstractmethod
    def span(self, sizes: Sizes) -> int:
        """Blocks before a boundary that are kept there."""

    @abstractmethod
    def scratch_blocks(self, sizes: Sizes) -> int:
        """Blocks that one sequence is granted at most, and so what it has in addition to its hits."""

    def num_for(self, text: Text, sizes: Sizes) -> int:
        """Fewer if it hits much of its prompt; see Group."""
        return min(self.scratch_blocks(sizes), text.most_blocks(sizes.block_size))

    def most_blocks(self, sizes: Sizes) -> int | None:
        """The pool bounds the text if it has no room for a whole scratch and what it may hit; see Group."""
        has_room = self.num_blocks - 1 >= self.scratch_blocks(sizes) + self.span(sizes)
        return None if has_room else self.num_blocks - 1

    def num_spare(self, sizes: Sizes, spare: int, num_forks: int, num_lacking: int) -> int:
        """What boundaries lack takes an eighth of the pool at most, or one window: one that is not named is only a lost hit."""
        most = max(self.num_blocks // 8, self.span(sizes))
        return min(num_lacking, most) + self.num_for_forks(sizes, num_forks)

    def num_for_beams(self, sizes: Sizes, num_beams: int) -> int:
        """The beam that has computed the prompt has what it was granted and has hit, each other one what a fork gets; see Group."""
        return self.scratch_blocks(sizes) + self.span(sizes) + (num_beams - 1) * self.fork_blocks(sizes)

    def read(self, granted: cache_pb2.Granted, group: int, text: Text, sizes: Sizes) -> GroupGrant:
        """Check that it is all that is needed before the first token that is not cached; see Group."""
        run, num_hits = granted.tables[group], granted.num_cached_tokens // sizes.block_size
        first = max(0, num_hits - self.span(sizes))
        if len(run.block_ids) != num_hits - first or (run.block_ids and run.start_index != first):
            raise disagree_about(
                len(run.block_ids),
                group,
                text,
                f"from index {run.start_index} on as the window before block {num_hits}, which has the indexes "
                f"{list(range(first, num_hits))}",
            )
        scratch = next((scratch for scratch in granted.scratch if scratch.group == group), common_pb2.BlockRun())
        num_needed = min(self.scratch_blocks(sizes), text.most_blocks(sizes.block_size) - num_hits)
        if len(scratch.block_ids) < num_needed:
            raise disagree_about(len(scratch.block_ids), group, text, f"as scratch, {num_needed} are needed")
        return GroupGrant(
            Run(run.block_ids[:], run.generations[:], first), Run(scratch.block_ids[:], scratch.generations[:])
        )

    def accept(self, ledger: BlockLedger, hits: Run, last: Content | None, tokens: bytes, text: Text) -> Content | None:
        return ledger.accept_window(hits.entries(), last, tokens, text.root)
