"""What a pool notes for pictures while somebody watches: which blocks may have changed."""

from __future__ import annotations


class BlockChanges:
    """Blocks of one pool that have changed and are not in a picture yet. The pool adds, a mirror takes away."""

    __slots__ = ("others", "used")

    def __init__(self) -> None:
        self.used: set[int] = set()
        """Granted or hit: also where a block looks as before, because it was evicted and granted again."""
        self.others: set[int] = set()
        """Whose state or ref_count has changed in another way."""
