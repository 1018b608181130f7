"""The content of the cache as a tree for the page, in which chains are folded."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from kvpool.client import ContentNode, ContentsView

MAX_CHAIN_BLOCKS: Final = 4096
"""Most blocks in one entry."""
MAX_TEXT_TOKENS: Final = 64
"""Tokens of an entry that its text is made of."""


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A chain of blocks on the same workers, each of which is the only child of the one before."""

    first: ContentNode
    last: ContentNode
    num_blocks: int
    tokens: bytes
    """First tokens of the chain, as little-endian uint32."""


def entries_after(view: ContentsView, parent: ContentNode | None, most: int) -> tuple[list[PrefixEntry], int]:
    """Return the entries after a node (None: the beginnings), at most `most`, those that saved most first; and their total
    number."""
    nodes = list(view.beginnings() if parent is None else parent.children.values())
    widest = heapq.nsmallest(most, nodes, key=lambda node: (-node.num_served_tokens, node.node))
    return [_fold(node) for node in widest], len(nodes)


def beginning_of(node: ContentNode) -> ContentNode:
    """Return the node that begins the chain, which has its root and the number of its salt."""
    while node.parent is not None:
        node = node.parent
    return node


def _fold(first: ContentNode) -> PrefixEntry:
    last, num_blocks = first, 1
    tokens = bytearray(first.tokens)
    while len(last.children) == 1 and num_blocks < MAX_CHAIN_BLOCKS:
        (child,) = last.children.values()
        if child.sessions.keys() != first.sessions.keys() or child.num_served_tokens != first.num_served_tokens:
            break
        last, num_blocks = child, num_blocks + 1
        if len(tokens) < 4 * MAX_TEXT_TOKENS:
            tokens += child.tokens
    return PrefixEntry(first, last, num_blocks, bytes(tokens[: 4 * MAX_TEXT_TOKENS]))
