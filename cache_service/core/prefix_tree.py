"""The prefix tree: one node per distinct block of tokens behind a distinct prefix, over all workers.

Nodes are interned: under one root, equal prefixes are the same node, so "is this the same prefix" is `is`. A node is found by
its parent and the exact bytes of its tokens; the dict's own hash is only a place to look. It lives while it has a copy in some
pool, a child, or a live sequence standing on it. Parent and child refer to each other; pruning breaks both ends, so that a
dropped node is freed by reference counting alone (the process runs without the cyclic collector).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .hashing import HashFunction, block_hash, root_bytes
from .messages import TOKEN_BYTES, Root

if TYPE_CHECKING:
    from .block_pool import BlockPool
    from .sequence import Sequence


class Node:
    """One block's worth of tokens behind one prefix. The first child, copy and leader are stored inline, because nearly all
    nodes have at most one of each."""

    __slots__ = (
        "block_hash",
        "child",
        "children",
        "copies",
        "copy_block",
        "copy_pool",
        "depth",
        "leaders",
        "num_sequences",
        "parent",
        "tokens",
    )

    def __init__(self, parent: Node | None, tokens: bytes, depth: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.depth = depth
        """Index of the block in its chain, from 0; −1 for a root."""
        self.block_hash: int | None = None
        """Name of the block; None until some worker has sealed a copy."""
        self.child: Node | None = None
        self.children: dict[bytes, Node] | None = None
        self.copy_pool: BlockPool | None = None
        self.copy_block = 0
        self.copies: dict[BlockPool, int] | None = None
        self.num_sequences = 0
        """Live sequences whose deepest node this is."""
        self.leaders: Sequence | dict[Sequence, None] | None = None
        """Live sequences that are computing this block, oldest first."""

    def __repr__(self) -> str:
        name = "unsealed" if self.block_hash is None else f"{self.block_hash:016x}"
        return f"<Node depth={self.depth} {name} copies={sum(1 for _ in self.pools())}>"

    # -- children

    def find(self, tokens: bytes) -> Node | None:
        """The child that holds exactly `tokens`."""
        child = self.child
        if child is not None and child.tokens == tokens:
            return child
        return None if self.children is None else self.children.get(tokens)

    def intern(self, tokens: bytes) -> Node:
        """The child that holds exactly `tokens`, made if there is none."""
        node = self.find(tokens)
        if node is None:
            node = Node(self, tokens, self.depth + 1)
            if self.child is None:
                self.child = node
            elif self.children is None:
                self.children = {tokens: node}
            else:
                self.children[tokens] = node
        return node

    def _drop_child(self, node: Node) -> None:
        if self.child is node:
            self.child = None
            return
        assert self.children is not None
        del self.children[node.tokens]
        if not self.children:
            self.children = None

    def iter_children(self) -> Iterator[Node]:
        """All children, in no particular order."""
        if self.child is not None:
            yield self.child
        if self.children is not None:
            yield from self.children.values()

    # -- copies

    def copy_in(self, pool: BlockPool) -> int:
        """The block of `pool` that serves hits on this node; 0 if there is none."""
        if self.copy_pool is pool:
            return self.copy_block
        return 0 if self.copies is None else self.copies.get(pool, 0)

    def add_copy(self, pool: BlockPool, block: int) -> None:
        """Make `block` the copy that serves hits in `pool`, which has none yet."""
        if self.copy_pool is None:
            self.copy_pool, self.copy_block = pool, block
        elif self.copies is None:
            self.copies = {pool: block}
        else:
            self.copies[pool] = block

    def drop_copy(self, pool: BlockPool) -> None:
        """Forget the copy in `pool`, if there is one. Does not prune."""
        if self.copy_pool is pool:
            self.copy_pool, self.copy_block = None, 0
        elif self.copies is not None:
            self.copies.pop(pool, None)
            if not self.copies:
                self.copies = None

    def pools(self) -> Iterator[BlockPool]:
        """Pools that hold a copy, retired ones included."""
        if self.copy_pool is not None:
            yield self.copy_pool
        if self.copies is not None:
            yield from self.copies

    # -- leaders

    def iter_leaders(self) -> Iterator[Sequence]:
        """Sequences that are computing this block, oldest first."""
        if isinstance(self.leaders, dict):
            yield from self.leaders
        elif self.leaders is not None:
            yield self.leaders

    def add_leader(self, sequence: Sequence) -> None:
        """`sequence` has been granted a block to compute this node in."""
        if self.leaders is None:
            self.leaders = sequence
        elif isinstance(self.leaders, dict):
            self.leaders[sequence] = None
        else:
            self.leaders = {self.leaders: None, sequence: None}

    def drop_leader(self, sequence: Sequence) -> None:
        """`sequence` has sealed its block, or has ended."""
        if self.leaders is sequence:
            self.leaders = None
        elif isinstance(self.leaders, dict):
            self.leaders.pop(sequence, None)
            if not self.leaders:
                self.leaders = None

    # -- life

    def is_unused(self) -> bool:
        """Whether nothing keeps the node: no copy, no child, no live sequence on it."""
        return (
            self.copy_pool is None
            and self.child is None
            and self.num_sequences == 0
            and self.copies is None
            and self.children is None
        )


class RootNode(Node):
    """Where the chains of one root and one block size begin. Its `tokens` are the root's encoding."""

    __slots__ = ("key",)

    def __init__(self, key: tuple[Root, int]) -> None:
        super().__init__(None, root_bytes(*key), -1)
        self.key = key


class PrefixTree:
    """All roots and the nodes behind them."""

    def __init__(self, hash_function: HashFunction) -> None:
        self._hash_function = hash_function
        self._roots: dict[tuple[Root, int], RootNode] = {}
        self.num_nodes = 0
        """Nodes behind the roots, the roots themselves not counted."""

    def find_root(self, root: Root, block_size: int) -> Node | None:
        """The node of a root; None if nothing is known behind it."""
        return self._roots.get((root, block_size))

    def intern_root(self, root: Root, block_size: int) -> Node:
        """The node of a root, made if there is none."""
        node = self._roots.get((root, block_size))
        if node is None:
            node = self._roots[root, block_size] = RootNode((root, block_size))
            node.block_hash = self._hash_function(node.tokens)
        return node

    def match(self, root: Node, tokens: bytes, block_size: int, max_blocks: int) -> list[Node]:
        """The longest path of nodes along the first `max_blocks` full blocks of `tokens`. Changes nothing."""
        path: list[Node] = []
        node = root
        step = block_size * TOKEN_BYTES
        for begin in range(0, max_blocks * step, step):
            child = node.find(tokens[begin : begin + step])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def extend(self, path: list[Node], root: Node, tokens: bytes | bytearray, block_size: int, num_blocks: int) -> None:
        """Intern the nodes of the full blocks len(path) … num_blocks − 1 of `tokens` and append them to `path`."""
        node = path[-1] if path else root
        step = block_size * TOKEN_BYTES
        for begin in range(len(path) * step, num_blocks * step, step):
            piece = bytes(tokens[begin : begin + step])
            child = node.find(piece)
            if child is None:
                child = node.intern(piece)
                self.num_nodes += 1
            path.append(child)
            node = child

    def name(self, node: Node) -> None:
        """Compute the block hash of a node that is being sealed; its parent has one."""
        if node.block_hash is None:
            assert node.parent is not None
            assert node.parent.block_hash is not None
            node.block_hash = block_hash(self._hash_function, node.parent.block_hash, node.tokens)

    def prune(self, node: Node) -> None:
        """Drop `node` and then its ancestors as far as nothing keeps them. Iterative: chains are thousands of blocks long."""
        while node.is_unused():
            parent = node.parent
            if parent is None:
                if isinstance(node, RootNode):
                    self._roots.pop(node.key, None)
                return
            parent._drop_child(node)
            node.parent = None
            self.num_nodes -= 1
            node = parent

    def iter_nodes(self) -> Iterator[Node]:
        """All nodes, the roots first. Only for audits: the tree must not change meanwhile."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.iter_children())
