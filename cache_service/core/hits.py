"""Look-ups: how much of a path of the prefix tree a session has, so that a sequence need not compute it. They change nothing.

A *hit* of m nodes: each group has all that it needs of them. Whole groups need all of them, so they have each shorter hit too;
dependent ones may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

from .copies import Holder
from .groups.group import SessionGroup
from .messages import AllocateItem
from .prefix_tree import Node, RootNode
from .session import Session


def hits_in(
    session: Session, item: AllocateItem, root: RootNode | None, path: List[Node], max_blocks: int
) -> tuple[int, list[list[int]]]:
    """The longest hit of at most `max_blocks` nodes, and its blocks by slot. Raises Refusal: BAD_FIELD."""
    hits: list[list[int]] = [[]] * len(session.by_slot)
    num = min(max_blocks, len(path))
    for group in session.whole:
        hits[group.slot] = found = group.hit(item, root, path, num)
        num = len(found)
    if session.partial or len(hits) > 1:
        num = longest_hit(path, session.dependents, num)
        for group in session.whole:
            del hits[group.slot][num:]
        for group in session.partial:
            hits[group.slot] = group.hit(item, root, path, num)
    return num, hits


def longest_hit(path: List[Node], dependents: List[SessionGroup], most: int) -> int:
    """The longest hit in these groups, of at most `most` nodes, of which all whole groups have copies."""
    while True:
        num = most
        for group in dependents:
            num = group.longest_hit(path, num)
        if num == most or len(dependents) < 2:
            return num
        most = num


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


def cached_along(path: List[Node], dependent: Iterable[Session], max_blocks: int) -> dict[Holder, int]:
    """How many leading nodes of the path look-ups find, by holder; for those that find any. `dependent`: the sessions in question
    that have dependent groups; of these at most `max_blocks`, because they may have a longer hit and not one that short."""
    found = reach(path, Node.complete_holders, Node.copies_signature)
    for session in dependent:
        num_passed = found.pop(session.holder, 0)
        most = num_passed if session.whole else len(path)
        num = longest_hit(path, session.dependents, min(most, max_blocks))
        if num:
            found[session.holder] = num
    return found
