"""The content of the cache as a tree for the page: chains are folded, and each has the number of tokens that it saved."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from kvpool.client import ContentNode, ContentsView
from kvpool.v1 import cache_pb2, common_pb2

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
    num_saved_tokens: int
    """Prompt tokens that the cache has served to requests with a hit that reaches this chain, since somebody looks."""


class PageTree:
    """The tree of prefixes, put together from the contents of Watch."""

    def __init__(self) -> None:
        self._view = ContentsView()
        self._saved: dict[int, int] = {}
        """Prompt tokens of the hits that reach a node, by its number."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole state has arrived."""
        return self._view.is_complete

    @property
    def num_nodes(self) -> int:
        """Number of distinct blocks of tokens, each counted once however many workers have it."""
        return len(self._view.nodes)

    def apply(self, contents: cache_pb2.Contents) -> None:
        """Take in the next message. Takes time in proportion to its events, and to the depth of the hits."""
        if contents.whole_begins:
            self._saved.clear()
        self._view.apply(contents)
        for event in contents.events:
            kind = event.WhichOneof("event")
            if kind == "served":
                self._save(event.served.node, event.served.num_cached_tokens)
            elif kind == "removed" and event.removed.forgotten:
                self._saved.pop(event.removed.node, None)

    def _save(self, number: int, num_tokens: int) -> None:
        node = self._view.nodes.get(number)
        while node is not None:
            self._saved[node.node] = self._saved.get(node.node, 0) + num_tokens
            node = node.parent

    def find(self, number: int) -> ContentNode | None:
        """Return a node; None: it is not listed any more."""
        return self._view.nodes.get(number)

    def children(self, parent: ContentNode | None, most: int) -> tuple[list[PrefixEntry], int]:
        """Return the entries after a node (None: the beginnings), at most `most`, those that saved most first; and their total
        number."""
        nodes = list(self._view.beginnings() if parent is None else parent.children.values())
        widest = heapq.nsmallest(most, nodes, key=lambda node: (-self._saved.get(node.node, 0), node.node))
        return [self._fold(node) for node in widest], len(nodes)

    def root_of(self, node: ContentNode) -> tuple[common_pb2.Root | None, int]:
        """Return the root of the node's chain, without the salt, and the number of the salt."""
        while node.parent is not None:
            node = node.parent
        return node.root, node.salt_number

    def _fold(self, first: ContentNode) -> PrefixEntry:
        last, num_blocks = first, 1
        tokens = bytearray(first.tokens)
        while len(last.children) == 1 and num_blocks < MAX_CHAIN_BLOCKS:
            (child,) = last.children.values()
            if child.sessions.keys() != first.sessions.keys() or self._saved_by(child) != self._saved_by(first):
                break
            last, num_blocks = child, num_blocks + 1
            if len(tokens) < 4 * MAX_TEXT_TOKENS:
                tokens += child.tokens
        return PrefixEntry(first, last, num_blocks, bytes(tokens[: 4 * MAX_TEXT_TOKENS]), self._saved_by(first))

    def _saved_by(self, node: ContentNode) -> int:
        return self._saved.get(node.node, 0)
