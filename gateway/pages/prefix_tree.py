"""The content of the cache as a tree for the page, in which chains are folded."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

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

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model that computed it."""
        root = self.first.path()[0].root
        return "" if root is None else root.model_fingerprint

    def as_object(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the entry as JSON values; without a tokenizer its text is null."""
        ids = memoryview(self.tokens).cast("I").tolist()
        return {
            "node": str(self.last.node),
            "text": None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False),
            "num_blocks": self.num_blocks,
            "num_tokens": self.num_blocks * (len(self.first.tokens) // 4),
            "num_saved_tokens": self.first.num_served_tokens,
            "workers": sorted(self.first.sessions.values()),
            "num_children": len(self.last.children),
            "salt_number": self.first.path()[0].salt_number,
        }


def entries_after(view: ContentsView, parent: ContentNode | None, most: int) -> tuple[list[PrefixEntry], int]:
    """Return the entries after a node (None: the beginnings), at most `most`, those that saved most first; and their total
    number."""
    nodes = list(view.beginnings() if parent is None else parent.children.values())
    widest = heapq.nsmallest(most, nodes, key=lambda node: (-node.num_served_tokens, node.node))
    return [_fold(node) for node in widest], len(nodes)


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
