"""Cross attention: units, each the KV of one encoder's input.

A unit is computed in the step that computes the first tokens of a sequence; its blocks are complete, a hit, and forgotten together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.v1 import cache_pb2, common_pb2

from ..ledger import BlockLedger, Content, DisagreementError, WholeContent
from ..reserve import SpareBlock
from .group import Forked, Group, GroupGrant, PlainTable, Run, Sizes, Statement, Text, disagree_about


class Unit(Content):
    """What the blocks of a unit hold: an encoder's input, which the root names by its SHA-256."""

    __slots__ = ("num_tokens", "unit_blocks")

    def __init__(self, root: common_pb2.Root, num_tokens: int, blocks: List[int], num_groups: int) -> None:
        super().__init__(None, root, b"", num_groups)
        self.num_tokens = num_tokens
        """Tokens of the input."""
        self.unit_blocks = tuple(blocks)
        """The unit's blocks, in order."""


class UnitLedger(BlockLedger):
    """The blocks of a group with cross attention. It enforces what any ledger does, and that a unit is whole: a block of one is
    granted again only if nothing here uses any of it, and a unit is a hit only with all of its blocks, in order."""

    is_chained = False

    def accept_grant(self, block: int, generation: int) -> None:
        """Accept a grant as any ledger does; the other blocks of the unit that the block was part of hold nothing any more."""
        unit = self.content(block) if 0 < block < self.num_blocks else None
        if not isinstance(unit, Unit):
            super().accept_grant(block, generation)
            return
        used = [unit_block for unit_block in unit.unit_blocks if self.is_used(unit_block)]
        if used:
            raise DisagreementError(
                f"block {block} was granted (generation {generation}) while a sequence uses block {used[0]} of the same unit"
            )
        super().accept_grant(block, generation)
        for unit_block in unit.unit_blocks:
            self.empty(unit_block)

    def complete_unit(self, blocks: List[int], root: common_pb2.Root, num_tokens: int, num_groups: int) -> None:
        """The encoder's KV is complete in all of these blocks, which are in a table."""
        unit = Unit(root, num_tokens, blocks, num_groups)
        for block in blocks:
            self.complete(block, unit)

    def accept_unit(self, blocks: List[int], generations: List[int], root: common_pb2.Root, num_tokens: int) -> None:
        """The manager returns these blocks as the unit of a root. Raises DisagreementError."""
        contents = [self.held(block, generation) for block, generation in zip(blocks, generations, strict=True)]
        unit = contents[0] if contents else None
        if (
            not isinstance(unit, Unit)
            or unit.unit_blocks != tuple(blocks)
            or any(content is not unit for content in contents)
        ):
            raise DisagreementError(f"the blocks {list(blocks)} were returned as a unit, and are not one")
        if unit.root != root or unit.num_tokens != num_tokens:
            raise DisagreementError(
                f"the blocks {list(blocks)} were returned for another encoder's input than they hold: of {num_tokens} tokens, "
                f"where they hold {unit.num_tokens}, or under another root"
            )

    def whole_contents(self) -> list[WholeContent]:
        contents = map(self.content, range(self.num_blocks))
        units = dict.fromkeys(unit for unit in contents if isinstance(unit, Unit))
        return [WholeContent(unit, unit.unit_blocks) for unit in units]


class UnitTable(PlainTable):
    """The unit of one sequence, which forks share."""

    is_encoder = True

    def __init__(self, run: Run, ledger: UnitLedger, num_tokens: int, *, was_encoded: bool) -> None:
        """`num_tokens`: of the encoder's input. `was_encoded`: the unit is a hit."""
        super().__init__(run.blocks, run.generations)
        self._ledger = ledger
        self._num_tokens = num_tokens
        self.was_encoded = self._is_computed = self._is_acked = was_encoded

    @property
    def num_tokens_to_encode(self) -> int:
        return 0 if self._is_computed else self._num_tokens

    def encode(self, root: common_pb2.Root, num_groups: int) -> None:
        self._is_computed = True
        self._ledger.complete_unit(self.table, root, self._num_tokens, num_groups)

    def advance(self, num_computed_tokens: int, num_slots: int, spare: Iterable[SpareBlock] = ()) -> None:
        """Do nothing: a unit has all of its blocks from the beginning."""

    def num_for_fork(self, num_computed_tokens: int, num_to_come: int) -> int:
        return 0

    def fork(self, num_computed_tokens: int, spare: List[SpareBlock]) -> Forked:
        fork = UnitTable(Run(self.table, self.generations), self._ledger, self._num_tokens, was_encoded=False)
        fork._is_computed = fork._is_acked = self._is_computed
        return Forked(fork, self.table, ())

    @property
    def from_reserve(self) -> list[SpareBlock]:
        return []

    @property
    def num_unstated(self) -> int:
        return 0

    @property
    def has_news(self) -> bool:
        return self._is_computed and not self._is_acked

    def state(self, copied: Container[int] = ()) -> tuple[Statement, list[int]]:
        return Statement(encoder_computed=self.has_news), []

    def acknowledge(self, stated: Statement) -> None:
        self._is_acked = self._is_acked or stated.encoder_computed

    def acknowledge_all(self) -> list[int]:
        self._is_acked = self._is_computed
        return []


@dataclass(frozen=True)
class UnitGroup(Group):
    """Layers that attend to the output of an encoder."""

    max_encoder_tokens: int
    """Tokens of the longest input."""

    table_type = UnitTable
    ledger_type = UnitLedger

    def introduce(self, spec: common_pb2.KVCacheGroup, sizes: Sizes) -> None:
        spec.cross_attention.max_encoder_tokens = self.max_encoder_tokens

    def num_for(self, text: Text, sizes: Sizes) -> int:
        return -(-text.num_encoder_tokens // sizes.block_size)

    def fork_blocks(self, sizes: Sizes) -> int:
        """Forks share the unit; see Group."""
        return 0

    def most_encoder_blocks(self) -> int:
        return self.num_blocks - 1

    def num_spare(self, sizes: Sizes, spare: int, num_forks: int, num_lacking: int) -> int:
        """A unit is granted whole, never grows, and is shared by forks; see Group."""
        return 0

    def read(self, granted: cache_pb2.Granted, group: int, text: Text, sizes: Sizes) -> GroupGrant:
        run, num_needed = granted.tables[group], self.num_for(text, sizes)
        if len(run.block_ids) != num_needed:
            need = f"for an encoder's input of {text.num_encoder_tokens} tokens, which needs {num_needed}"
            raise disagree_about(len(run.block_ids), group, text, need)
        unit = Run(run.block_ids[:], run.generations[:])
        return GroupGrant(hits=unit) if granted.encoder_cached else GroupGrant(empty=unit)

    def accept(self, ledger: BlockLedger, hits: Run, last: Content | None, tokens: bytes, text: Text) -> Content | None:
        assert isinstance(ledger, UnitLedger)
        if hits.blocks:
            ledger.accept_unit(hits.blocks, hits.generations, text.root, text.num_encoder_tokens)
        return last

    def take(self, ledger: BlockLedger, granted: GroupGrant, text: Text, sizes: Sizes) -> UnitTable:
        assert isinstance(ledger, UnitLedger)
        is_hit = bool(granted.hits.blocks)
        run = granted.hits if is_hit else granted.empty
        return UnitTable(run, ledger, text.num_encoder_tokens, was_encoded=is_hit)
