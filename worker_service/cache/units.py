"""Units: the KV of encoder inputs in the group with cross attention, as this worker knows it.

A unit is computed in the step that computes the first tokens of a sequence; its blocks are complete, a hit, and forgotten together.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from kvpool.v1 import common_pb2

from .ledger import BlockLedger, Content, DisagreementError


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
            self.forget(unit_block)

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

    def units(self) -> list[Unit]:
        """All units that are complete, in no particular order; for reports."""
        contents = map(self.content, range(self.num_blocks))
        return list(dict.fromkeys(unit for unit in contents if isinstance(unit, Unit)))
