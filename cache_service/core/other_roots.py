"""Whether the tokens of a prompt are cached under another root than its own: another adapter, model, input, block size or salt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .copies import Holder
from .hits import reach
from .messages import TOKEN_BYTES, Root
from .prefix_tree import Node, PrefixTree, RootNode
from .session import Session

MAX_ROOTS = 1024
"""Searched in one answer, the latest ones: some 0.4 ms."""

MAX_NODES = 2048
"""Visited in one answer, over all roots."""


class OtherRoot(NamedTuple):
    """A root under which a worker has the tokens up to some position."""

    root: Root
    block_size: int
    is_other_salt: bool
    session: Session


class OtherRoots:
    """The search of one Explain. Roots of other salts are not visited at all unless `across_salts`: neither the answer nor the time
    that it takes may depend on them."""

    def __init__(
        self, tree: PrefixTree, holders: Mapping[Holder, Session], root: Root, tokens: bytes, *, across_salts: bool
    ) -> None:
        self._tree = tree
        self._holders = holders
        self._root = root
        self._tokens = tokens
        self._across_salts = across_salts
        self._candidates: list[RootNode] | None = None
        self._nodes_left = MAX_NODES
        self._found: dict[tuple[int, int], OtherRoot | None] = {}

    def find(self, position: int, block_size: int) -> OtherRoot | None:
        """Another root than the prompt's with that block size under which one worker has the prompt beyond `position` tokens. A
        root with the same salt is preferred."""
        where = position, block_size
        if where not in self._found:
            self._found[where] = self._search(position, block_size)
        return self._found[where]

    def _search(self, position: int, block_size: int) -> OtherRoot | None:
        for node in self._roots():
            if node.key == (self._root, block_size):
                continue
            if self._nodes_left <= 0:
                break
            session = self._worker_with(node, position)
            if session is not None:
                root, other_size = node.key
                return OtherRoot(root, other_size, root.tenant_salt != self._root.tenant_salt, session)
        return None

    def _roots(self) -> list[RootNode]:
        if self._candidates is None:
            salt = self._root.tenant_salt
            self._candidates = self._tree.latest_roots(salt, MAX_ROOTS)
            if self._across_salts:
                others = self._tree.latest_roots(None, MAX_ROOTS)
                self._candidates += [node for node in others if node.key[0].tenant_salt != salt]
        return self._candidates

    def _worker_with(self, root: RootNode, position: int) -> Session | None:
        """A worker that has the prompt beyond `position` tokens under that root."""
        block_size = root.key[1]
        num_blocks = position // block_size + 1
        if num_blocks > len(self._tokens) // TOKEN_BYTES // block_size:
            return None
        path = self._tree.match(root, self._tokens, block_size, min(num_blocks, self._nodes_left))
        self._nodes_left -= len(path) + 1
        if len(path) < num_blocks:
            return None
        for holder, count in reach(path, Node.complete_holders, Node.copies_signature).items():
            if count == num_blocks and holder in self._holders:
                return self._holders[holder]
        return None
