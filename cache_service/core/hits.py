"""Look-ups: how much of a path of the prefix tree a holder has, so that a sequence need not compute it. They change nothing.

A *hit* of m nodes: each slot without a window has a copy of all m, and each slot with one of the last min(m, span). So windows may
have holes, as long as the last part is whole. A slot with states has a span of 1: the snapshot at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

from .copies import SLOT_BITS, SLOT_MASK, Holder
from .prefix_tree import Node


class Hits(NamedTuple):
    """What a holder has along a path."""

    num: int
    """Leading nodes that a sequence need not compute."""
    blocks: tuple[list[int], ...]
    """By slot: the copies of these nodes; of a slot with a window those of the last ones, span at most; of units none."""


def hits_in(path: List[Node], holder: Holder, max_blocks: int) -> Hits:
    """The longest hit of at most `max_blocks` nodes."""
    found = [node.copy_blocks if node.copy_holder is holder else node.blocks_in(holder) for node in path[:max_blocks]]
    if holder.full_slots and 0 in found:
        del found[found.index(0) :]
    spans = holder.spans
    if len(spans) == 1 and holder.full_slots:
        return Hits(len(found), (found,))
    hits = [[blocks >> slot * SLOT_BITS & SLOT_MASK for blocks in found] for slot in range(len(spans))]
    num = min([_first_hole(hits[slot]) for slot in holder.full_slots], default=len(found))
    windows = [(hits[slot], spans[slot]) for slot in holder.window_slots]
    while num:
        missing = max([_last_hole(blocks, num - span, num) for blocks, span in windows], default=-1)
        if missing < 0:
            break
        num = missing  # every hit between it and the last one would need this node too
    found_in = [one[max(0, num - span) if span else 0 : num] for one, span in zip(hits, spans, strict=True)]
    if holder.unit_slot is not None:
        found_in[holder.unit_slot] = []
    return Hits(num, tuple(found_in))


def _first_hole(blocks: List[int]) -> int:
    return blocks.index(0) if 0 in blocks else len(blocks)


def _last_hole(blocks: List[int], begin: int, end: int) -> int:
    """The last index in begin … end − 1 where there is no block; −1: there is none."""
    for index in range(end - 1, max(begin, 0) - 1, -1):
        if not blocks[index]:
            return index
    return -1


def reach(
    path: List[Node], holders_of: Callable[[Node], Iterable[Holder]], signature_of: Callable[[Node], object]
) -> dict[Holder, int]:
    """How many leading nodes of the path each holder has, for the holders of the first node.

    All workers have a common prefix, node after node. So a node costs one comparison of signatures where it has the same holders as
    the node before.
    """
    reached: dict[Holder, int] = {}
    if not path:
        return reached
    remaining, signature = set(holders_of(path[0])), signature_of(path[0])
    for index, node in enumerate(path):
        here = signature_of(node)
        if here == signature:
            continue
        signature = here
        left = remaining.intersection(holders_of(node))
        reached.update(dict.fromkeys(remaining - left, index))
        remaining = left
        if not remaining:
            return reached
    reached.update(dict.fromkeys(remaining, len(path)))
    return reached


def cached_along(path: List[Node], windowed: Iterable[Holder], max_blocks: int) -> dict[Holder, int]:
    """How many leading nodes of the path look-ups find, by holder; for those that find any. `windowed`: the holders in question
    that have slots with windows; of these at most `max_blocks`, because they may have a longer hit and not one that short."""
    found = reach(path, Node.complete_holders, Node.copies_signature)
    for holder in windowed:
        num_passed = found.pop(holder, 0)
        most = num_passed if holder.full_slots else len(path)
        num = num_with_windows(path, holder, min(most, max_blocks), holder.spans)
        if num:
            found[holder] = num
    return found


def num_with_windows(path: List[Node], holder: Holder, most: int, spans: List[int]) -> int:
    """The longest hit of at most `most` nodes, of which all slots without a window have copies. `spans`: by slot, as the holder's;
    0 for those that are left out."""
    longest = max(spans)
    num = most
    while num:
        for index in range(num - 1, max(0, num - longest) - 1, -1):
            blocks = path[index].blocks_in(holder)
            if any(
                index >= num - span and not blocks >> slot * SLOT_BITS & SLOT_MASK
                for slot, span in enumerate(spans)
                if span
            ):
                num = index
                break
        else:
            break
    return num
