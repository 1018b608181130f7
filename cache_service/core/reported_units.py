"""Units in a worker's report: the KV of encoder inputs, which is whole or not at all. Part of recovery.py."""

from __future__ import annotations

from . import units
from .messages import ReportedSequence, ReportedUnit, TableEntry
from .prefix_tree import Node, PrefixTree
from .session import Sequence
from .unit_pool import UnitPool


class ReportedUnits:
    """Those of one report, restored as they come; units come before the sequences that have them."""

    def __init__(self, pool: UnitPool, most_blocks: int) -> None:
        """`most_blocks`: of one unit."""
        self._pool = pool
        self._most_blocks = most_blocks
        self._units: dict[int, tuple[Node, ReportedUnit]] = {}
        """By first block."""
        self._blocks: set[int] = set()
        """All blocks of these."""

    @property
    def slot(self) -> int:
        """Of its pool."""
        return self._pool.slot

    def why_wrong(self, unit: ReportedUnit) -> str | None:
        """What is wrong with a unit whose blocks were not reported before, in words."""
        blocks = [one.block for one in unit.blocks]
        if unit.group != self._pool.slot:
            return f"group {unit.group} has no cross attention"
        if not 1 <= len(blocks) <= self._most_blocks:
            return f"a unit has 1 to {self._most_blocks} blocks, got {len(blocks)}"
        if len(unit.root.input_digest) != units.DIGEST_BYTES:
            return "a unit needs the SHA-256 of the encoder's input"
        if len(set(blocks)) < len(blocks) or not self._blocks.isdisjoint(blocks):
            return f"one of the blocks {blocks} of a unit is reported twice"
        return None

    def take(self, tree: PrefixTree, unit: ReportedUnit, block_size: int) -> bool:
        """A unit that was checked, and whose blocks are free. Returns whether it serves hits; otherwise another one does."""
        root = tree.intern_root(unit.root, block_size)
        self._units[unit.blocks[0].block] = root, unit
        self._blocks.update(one.block for one in unit.blocks)
        if self._pool.unit(root):
            return False
        self._pool.restore_unit(unit.blocks, root)
        return True

    def is_reported(self, block: int) -> bool:
        """Whether the block is part of a unit that has come."""
        return block in self._blocks

    def why_table_wrong(self, reported: ReportedSequence, root: Node) -> str | None:
        """What is wrong with the table of a sequence, in words. The caller checks that blocks of no reported unit are free."""
        table = reported.tables[self._pool.slot]
        name = f"sequence {reported.key.sequence_id!r}"
        if not 1 <= len(table) <= self._most_blocks:
            return f"{name}: needed 1 to {self._most_blocks} blocks for the encoder's input, got {len(table)}"
        if len({entry.block for entry in table}) < len(table):
            return f"{name}: a block is twice in its unit"
        if reported.num_computed_tokens > reported.num_cached_tokens and not reported.encoder_computed:
            return f"{name}: tokens are computed without the encoder's output"
        if not any(entry.block in self._blocks for entry in table):
            return None
        of, unit = self._units.get(table[0].block, (None, None))
        if unit is None or of is not root or not reported.encoder_computed or not _is_all_of(unit, table):
            return f"{name}: its unit is not one that the report states to be complete under its root"
        return None

    def is_unit_of(self, sequence: Sequence) -> bool:
        """Whether the checked table of a restored sequence is the unit that serves hits."""
        return tuple(sequence.tables[self.slot]) == self._pool.unit(sequence.root)


def _is_all_of(unit: ReportedUnit, table: tuple[TableEntry, ...]) -> bool:
    return [tuple(one) for one in unit.blocks] == [(entry.block, entry.generation) for entry in table]
