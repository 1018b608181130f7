"""Which sequences of a step read the same leading blocks, so that these can be attended once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class SharedPrefix(NamedTuple):
    """Parts of a step whose block tables begin with the same blocks."""

    parts: list[int]
    """Indices of the parts, ascending; at least two."""
    num_blocks: int
    """Leading blocks that all of them share and none of them writes in this step."""

    @property
    def saved_blocks(self) -> int:
        """Block reads that attending once saves."""
        return (len(self.parts) - 1) * self.num_blocks


def find_shared_prefixes(
    tables: Sequence[list[int]], starts: Sequence[int], block_size: int, min_saved_tokens: int
) -> list[SharedPrefix]:
    """Disjoint sets of parts that share leading blocks, each saving at least min_saved_tokens KV reads per layer.

    Only blocks below every member's start count: their KV is complete, so no causal mask is needed. Where some members
    share more blocks than all of them do, the cut that saves more is taken.
    """
    readable = [table[: start // block_size] for table, start in zip(tables, starts, strict=True)]
    found: list[SharedPrefix] = []
    for members in _by_block(readable, list(range(len(readable))), depth=0):
        found.extend(_best(readable, members))
    return [prefix for prefix in found if prefix.saved_blocks * block_size >= min_saved_tokens]


def _best(tables: Sequence[list[int]], members: list[int]) -> list[SharedPrefix]:
    if len(members) < 2:
        return []
    depth = _common_length([tables[index] for index in members])
    whole = SharedPrefix(members, depth)
    split = [prefix for group in _by_block(tables, members, depth) for prefix in _best(tables, group)]
    return split if sum(prefix.saved_blocks for prefix in split) > whole.saved_blocks else [whole]


def _by_block(tables: Sequence[list[int]], members: list[int], depth: int) -> list[list[int]]:
    """Members grouped by their block at index depth; those that end before it are left out."""
    groups: dict[int, list[int]] = {}
    for index in members:
        if len(tables[index]) > depth:
            groups.setdefault(tables[index][depth], []).append(index)
    return list(groups.values())


def _common_length(tables: list[list[int]]) -> int:
    # Whatever the smallest and the largest table share in lexicographic order, all tables share.
    pairs = zip(min(tables), max(tables), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
