"""What a worker's report has stated of the blocks of one group so far. Part of recovery.py."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import NoReturn

from .block_pool import BlockPool
from .messages import ReportedUnit
from .prefix_tree import Node
from .refusal import Reason, Refusal


class Case(Enum):
    """What a report states of one block or sequence."""

    CACHED = "cached"
    DUPLICATE = "duplicate"
    BLOCKLESS = "blockless"
    HELD_SEALED = "held_sealed"
    SHARED = "shared"
    HELD_FILLING = "held_filling"
    SCRATCH = "scratch"
    DEPENDENT = "dependent"
    RESERVED = "reserved"
    GRANTED_SINCE = "granted_since"
    NO_ROOM = "no_room"
    LIVE = "live"
    FENCES = "fences"
    FENCED = "fenced"


class Restored:
    """The blocks of one group. `last_stamp`: no block can have a larger generation."""

    def __init__(self, pool: BlockPool, last_stamp: int, cases: Counter[Case]) -> None:
        self.pool = pool
        self.cases = cases
        self.blocks: dict[int, tuple[Node, int]] = {}
        """Complete blocks: node and generation."""
        self.units: dict[int, tuple[Node, ReportedUnit]] = {}
        """Units, by each of their blocks: the root, and what was stated."""
        self.last_stamp = last_stamp

    def require_free(self, block: int, generation: int) -> None:
        """Refuse a block that was stated before."""
        self.require_known(block, generation)
        if not self.pool.is_free(block) or block in self.blocks:
            refuse_twice(block)

    def require_known(self, block: int, generation: int) -> None:
        """Refuse a block that the pool does not have, or a generation that nobody has given."""
        if not 0 < block < self.pool.num_blocks:
            refuse("blocks", f"block {block} does not exist: the pool has blocks 1 to {self.pool.num_blocks - 1}")
        if not 0 < generation <= self.last_stamp:
            refuse("blocks", f"block {block} has generation {generation:#x}, which no manager up to this one has given")


def refuse_twice(block: int) -> NoReturn:
    """Refuse a report that contradicts itself."""
    refuse("blocks", f"block {block} is reported twice, in different places")


def refuse(field: str, message: str) -> NoReturn:
    """Refuse a report. The caller ends the session."""
    raise Refusal(Reason.BAD_REPORT, f"the report is refused: {message}", field=field)
