"""The prefix tree: one node per distinct block of tokens after a distinct prefix, over all workers.

Nodes are interned: under one root, equal prefixes are the same node, so "is this the same prefix" is `is`. A node is found by
its parent and the exact bytes of its tokens; the dict's own hash is only a place to look. It lives while it has a copy in some
pool, a child, or a live sequence whose path ends at it. Parent and child refer to each other; pruning breaks both references, so
that reference counting alone frees a dropped node (the process runs without the cyclic collector).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from functools import reduce
from hashlib import blake2b
from itertools import islice
from operator import xor
from typing import Protocol

from .copies import SLOT_BITS, Copies, Holder, block_at, with_block
from .hashing import HashFunction, block_hash, root_bytes
from .messages import TOKEN_BYTES, Root, SequenceKey

FAN_CHILDREN = 1024
"""A node with more children than this keeps them in a Fan."""

FAN_PARTS = 256


class Journal(Protocol):
    """What is notified of changes in what look-ups find, while somebody follows them."""

    def sealed(
        self,
        key: SequenceKey,
        holder: Holder,
        slot: int,
        nodes: list[Node],
        table: list[int] | dict[int, int],
        begin: int,
        end: int,
    ) -> None:
        """A sequence has computed nodes[begin:end], in the blocks of its table at the same places."""

    def restored(self, node: Node, holder: Holder, slot: int) -> None:
        """A pool has got a node out of a report."""

    def removed(self, node: Node, holder: Holder, slot: int) -> None:
        """A pool is about to lose its last copy of a node."""

    def served(
        self, key: SequenceKey, holder: Holder, node: Node | None, num_cached_tokens: int, num_prompt_tokens: int
    ) -> None:
        """A sequence was granted blocks."""

    def dropped(self, node: Node) -> None:
        """A node was pruned."""


class Leader(Protocol):
    """What computes nodes that others can wait for: a live sequence."""

    key: SequenceKey
    nodes: list[Node]
    fenced: bool

    @property
    def holder(self) -> Holder:
        """The one whose blocks it fills."""


class Leaders(dict[Leader, None]):
    """Leaders, oldest first, how many of them each holder has, and the signature of the set of these holders, as in Copies."""

    __slots__ = ("num_by_holder", "signature")

    def __init__(self, *sequences: Leader) -> None:
        super().__init__()
        self.num_by_holder: dict[Holder, int] = {}
        self.signature = 0
        for sequence in sequences:
            self.add(sequence)

    def add(self, sequence: Leader) -> None:
        """Add a sequence that is not here."""
        self[sequence] = None
        holder = sequence.holder
        count = self.num_by_holder.get(holder, 0)
        if not count:
            self.signature ^= holder.signatures[0]
        self.num_by_holder[holder] = count + 1

    def drop(self, sequence: Leader) -> None:
        """Drop a sequence, if it is here."""
        if sequence not in self:
            return
        del self[sequence]
        holder = sequence.holder
        count = self.num_by_holder[holder] - 1
        if count:
            self.num_by_holder[holder] = count
        else:
            del self.num_by_holder[holder]
            self.signature ^= holder.signatures[0]

    def is_counted(self) -> bool:
        """Whether counts and signature are those of the sequences. A law."""
        counted = Counter(sequence.holder for sequence in self)
        return self.num_by_holder == counted and self.signature == reduce(
            xor, (holder.signatures[0] for holder in counted), 0
        )


class Node:
    """The tokens of one block after one prefix. The first child, copy and leader are stored inline, because nearly all nodes have
    at most one of each. A node is 128 bytes; one slot more would make it 144."""

    __slots__ = (
        "block_hash",
        "child",
        "children",
        "copies",
        "copy_blocks",
        "copy_holder",
        "depth",
        "leaders",
        "num_sequences",
        "parent",
        "seen",
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
        self.children: dict[bytes, Node] | Fan | None = None
        """All children but the first."""
        self.copy_holder: Holder | None = None
        self.copy_blocks = 0
        """Blocks of `copy_holder` with this content, one per slot, packed in one number; see copies.py. 0: there are none."""
        self.copies: Copies | None = None
        """All copies but the first."""
        self.num_sequences = 0
        """Live sequences whose deepest node this is."""
        self.leaders: Leader | Leaders | None = None
        """Live sequences that are computing this block, oldest first."""
        self.seen = 0
        """Number of the last walk that returned the node, or during which it was inserted."""

    def __repr__(self) -> str:
        name = "unsealed" if self.block_hash is None else f"{self.block_hash:016x}"
        return f"<Node depth={self.depth} {name} copies={sum(1 for _ in self.holders())}>"

    # -- children

    def find(self, tokens: bytes) -> Node | None:
        """The child that holds exactly `tokens`."""
        child = self.child
        if child is not None and child.tokens == tokens:
            return child
        return None if self.children is None else self.children.get(tokens)

    def _add_further_child(self, node: Node) -> None:
        """A child that is not the first."""
        if self.children is None:
            self.children = {node.tokens: node}
        else:
            self.children[node.tokens] = node
            if len(self.children) > FAN_CHILDREN and isinstance(self.children, dict):
                self.children = Fan(self.children)

    def _drop_child(self, node: Node) -> None:
        if self.child is node:
            self.child = None
            return
        assert self.children is not None
        del self.children[node.tokens]
        if not self.children:
            self.children = None

    @property
    def has_children(self) -> bool:
        """Whether it has any child: the first may have gone, and others be left."""
        return self.child is not None or self.children is not None

    @property
    def is_junction(self) -> bool:
        """Whether it has more than one child."""
        return self.children is not None and (self.child is not None or len(self.children) > 1)

    def iter_children(self) -> Iterator[Node]:
        """All children, in no particular order."""
        if self.child is not None:
            yield self.child
        if self.children is not None:
            yield from self.children.values()

    # -- copies

    def blocks_in(self, holder: Holder) -> int:
        """The blocks of `holder` that serve hits on this node; 0 if there is none."""
        if self.copy_holder is holder:
            return self.copy_blocks
        return 0 if self.copies is None else self.copies.get(holder, 0)

    def copy_in(self, holder: Holder, slot: int) -> int:
        """The block in a slot of `holder` that serves hits on this node; 0 if there is none."""
        if self.copy_holder is holder:
            blocks = self.copy_blocks
        elif self.copies is None:
            return 0
        else:
            blocks = self.copies.get(holder, 0)
        return block_at(blocks, slot)

    def add_copy(self, holder: Holder, slot: int, block: int) -> bool:
        """Make `block` the copy that serves hits in a slot, unless there is one; returns whether there was none."""
        if self.copy_holder is None and self.copies is None:  # nearly always
            self.copy_holder, self.copy_blocks = holder, block << slot * SLOT_BITS
            return True
        if self.copy_in(holder, slot):
            return False
        self.set_copy(holder, slot, block)
        return True

    def set_copy(self, holder: Holder, slot: int, block: int) -> None:
        """Make `block` the copy that serves hits in a slot; 0: there is none. Does not prune."""
        if self.copy_holder is holder:
            self.copy_blocks = with_block(self.copy_blocks, slot, block)
            if not self.copy_blocks:
                self.copy_holder = None
        elif self.copy_holder is None and (self.copies is None or holder not in self.copies):
            if block:
                self.copy_holder, self.copy_blocks = holder, with_block(0, slot, block)
        else:
            if self.copies is None:
                self.copies = Copies()
            self.copies.set(holder, with_block(self.copies.get(holder, 0), slot, block))
            if not self.copies:
                self.copies = None

    def holders(self) -> Iterator[Holder]:
        """Those that hold a copy in any slot, retired ones included."""
        if self.copy_holder is not None:
            yield self.copy_holder
        if self.copies is not None:
            yield from self.copies

    def complete_holders(self) -> Iterator[Holder]:
        """Those that hold a copy in each slot without a window: on them, look-ups can pass the node."""
        if self.copy_holder is not None and self.copy_holder.is_complete(self.copy_blocks):
            yield self.copy_holder
        if self.copies is not None:
            for holder, blocks in self.copies.items():
                if holder.is_complete(blocks):
                    yield holder

    def is_complete_in(self, holder: Holder) -> bool:
        """Whether the holder is one of these."""
        return holder.is_complete(self.blocks_in(holder))

    def copies_signature(self) -> int:
        """Return a hash of the set of slots that have a copy. Equal sets have equal hashes; see Copies."""
        signature = 0 if self.copies is None else self.copies.signature
        return signature if self.copy_holder is None else signature ^ self.copy_holder.signature_of(self.copy_blocks)

    # -- leaders

    def iter_leaders(self) -> Iterator[Leader]:
        """Sequences that are computing this block, oldest first."""
        if isinstance(self.leaders, Leaders):
            yield from self.leaders
        elif self.leaders is not None:
            yield self.leaders

    def add_leader(self, sequence: Leader) -> None:
        """`sequence` has been granted a block to compute this node in."""
        if self.leaders is None:
            self.leaders = sequence
        elif isinstance(self.leaders, Leaders):
            self.leaders.add(sequence)
        else:
            self.leaders = Leaders(self.leaders, sequence)

    def is_led_by(self, sequence: Leader) -> bool:
        """Whether `sequence` is one of those that are computing this block."""
        return self.leaders is sequence or (isinstance(self.leaders, Leaders) and sequence in self.leaders)

    def drop_leader(self, sequence: Leader) -> None:
        """`sequence` has sealed its block, or has ended."""
        if self.leaders is sequence:
            self.leaders = None
        elif isinstance(self.leaders, Leaders):
            self.leaders.drop(sequence)
            if not self.leaders:
                self.leaders = None

    def leading_holders(self) -> Collection[Holder]:
        """Those whose sequences are computing this block."""
        if self.leaders is None:
            return ()
        return self.leaders.num_by_holder if isinstance(self.leaders, Leaders) else (self.leaders.holder,)

    def leaders_signature(self) -> int:
        """Return a hash of the set of leading holders. Equal sets have equal hashes."""
        if self.leaders is None:
            return 0
        return self.leaders.signature if isinstance(self.leaders, Leaders) else self.leaders.holder.signatures[0]

    # -- life

    def is_unused(self) -> bool:
        """Whether nothing keeps the node: no copy, no child, no live sequence on it."""
        return (
            self.copy_holder is None
            and self.child is None
            and self.num_sequences == 0
            and self.copies is None
            and self.children is None
        )


class Fan:
    """The children of a node that has thousands, in many small dicts: one large dict would delay other calls when it grows or is
    walked."""

    __slots__ = ("num_children", "parts")

    def __init__(self, children: dict[bytes, Node]) -> None:
        self.num_children = 0
        self.parts: tuple[dict[bytes, Node], ...] = tuple({} for _ in range(FAN_PARTS))
        for tokens, node in children.items():
            self[tokens] = node

    def __len__(self) -> int:
        return self.num_children

    def get(self, tokens: bytes) -> Node | None:
        """The child that holds exactly `tokens`."""
        return self.parts[hash(tokens) % FAN_PARTS].get(tokens)

    def __setitem__(self, tokens: bytes, node: Node) -> None:
        """Add a child that is not here yet."""
        self.parts[hash(tokens) % FAN_PARTS][tokens] = node
        self.num_children += 1

    def __delitem__(self, tokens: bytes) -> None:
        del self.parts[hash(tokens) % FAN_PARTS][tokens]
        self.num_children -= 1

    def values(self) -> Iterator[Node]:
        """All of them."""
        for part in self.parts:
            yield from part.values()


class RootNode(Node):
    """The start of the chains of one root and one block size. Its `tokens` are the root's encoding. Its leaders are the sequences
    that are about to compute the KV of the root's input."""

    __slots__ = ("input_blocks", "key")

    def __init__(self, key: tuple[Root, int]) -> None:
        super().__init__(None, root_bytes(*key), -1)
        self.key = key
        self.input_blocks: dict[Holder, tuple[int, ...]] = {}
        """The blocks, in order, in which a holder has the KV of the input that the root names by its digest."""

    def is_unused(self) -> bool:
        """Return whether nothing keeps the root: no KV of its input, and nothing that keeps other nodes."""
        return not self.input_blocks and super().is_unused()


class PrefixTree:
    """All roots and their descendants."""

    def __init__(self, hash_function: HashFunction) -> None:
        self._hash_function = hash_function
        self._roots: dict[tuple[Root, int], RootNode] = {}
        self._salts: dict[str, dict[RootNode, None]] = {}
        """The same roots by salt, oldest first: Explain must not visit those of other salts, not even to pass them over."""
        self.num_nodes = 0
        """Nodes, the roots not counted."""
        self.walk: Walk | None = None
        """The walk in portions that is under way; the tree notifies it of insertions and removals."""
        self.journal: Journal | None = None
        """Set while somebody follows the contents."""
        self._num_walks = 0
        self._condemned: deque[Node] = deque()
        """Unused nodes at which a bounded `prune` has stopped; `prune_condemned` drops those that are not used again."""
        self._num_signatures = 0

    def new_holder(
        self, num_slots: int = 1, whole_slots: tuple[int, ...] = (0,), dependent_slots: tuple[int, ...] = ()
    ) -> Holder:
        """A holder for a new session. Its signatures are 60 pseudo-random bits each, the same in each run."""
        return Holder(tuple(self._new_signature() for _ in range(num_slots)), whole_slots, dependent_slots)

    def _new_signature(self) -> int:
        self._num_signatures += 1
        number = self._num_signatures.to_bytes(8, "little")
        return int.from_bytes(blake2b(number, digest_size=8).digest(), "little") >> 4

    def find_root(self, root: Root, block_size: int) -> RootNode | None:
        """The node of a root; None if it has no descendants."""
        return self._roots.get((root, block_size))

    def intern_root(self, root: Root, block_size: int) -> RootNode:
        """The node of a root, made if there is none."""
        node = self._roots.get((root, block_size))
        if node is None:
            node = self._roots[root, block_size] = RootNode((root, block_size))
            node.block_hash = self._hash_function(node.tokens)
            self._salts.setdefault(root.tenant_salt, {})[node] = None
        return node

    def _drop_root(self, node: RootNode) -> None:
        del self._roots[node.key]
        salt = node.key[0].tenant_salt
        of_salt = self._salts[salt]
        del of_salt[node]
        if not of_salt:
            del self._salts[salt]

    def match(self, root: Node, tokens: bytes, block_size: int, max_blocks: int) -> list[Node]:
        """The longest path of nodes along the first `max_blocks` full blocks of `tokens`. Changes nothing."""
        path: list[Node] = []
        node = root
        step = block_size * TOKEN_BYTES
        for begin in range(0, max_blocks * step, step):
            block = tokens[begin : begin + step]
            child = node.child
            if child is None or child.tokens != block:  # else as `find`, without the call
                child = node.find(block)
                if child is None:
                    break
            path.append(child)
            node = child
        return path

    def intern(self, parent: Node, tokens: bytes) -> Node:
        """The child of `parent` that holds exactly `tokens`, made if there is none."""
        return parent.find(tokens) or self._make(parent, tokens)

    def _make(self, parent: Node, tokens: bytes) -> Node:
        """A new child of `parent` that holds `tokens`, of which there is none yet."""
        node = Node(parent, tokens, parent.depth + 1)
        if parent.child is None:
            parent.child = node
        else:
            parent._add_further_child(node)
        self.num_nodes += 1
        if self.walk is not None:
            self.walk.on_made(node)
        return node

    def extend(self, path: list[Node], root: Node, tokens: bytes | bytearray, block_size: int, num_blocks: int) -> None:
        """Intern the nodes of the full blocks len(path) … num_blocks − 1 of `tokens` and append them to `path`."""
        node = path[-1] if path else root
        step = block_size * TOKEN_BYTES
        new_tokens = bytes(tokens[len(path) * step : num_blocks * step])
        for begin in range(0, len(new_tokens), step):
            block = new_tokens[begin : begin + step]
            # As `intern`, without the call.
            child = None if node.child is None and node.children is None else node.find(block)
            node = child or self._make(node, block)
            path.append(node)

    def name(self, node: Node) -> None:
        """Compute the block hash of a node that is being sealed; its parent has one."""
        if node.block_hash is None:
            assert node.parent is not None
            assert node.parent.block_hash is not None
            node.block_hash = block_hash(self._hash_function, node.parent.block_hash, node.tokens)

    def prune(self, node: Node, most: int = -1) -> int:
        """Drop `node` and then its ancestors as far as nothing keeps them; returns how many were dropped.

        Iterative: chains are thousands of blocks long. After `most` nodes the rest of the way is left to `prune_condemned`.
        """
        num_dropped = 0
        while node.is_unused():
            if num_dropped == most:
                self._condemned.append(node)
                break
            parent = node.parent
            if parent is None:
                if isinstance(node, RootNode) and self._roots.get(node.key) is node:
                    self._drop_root(node)
                break
            if self.walk is not None:
                self.walk.on_dropped(node)
            if self.journal is not None:
                self.journal.dropped(node)
            parent._drop_child(node)
            node.parent = None
            num_dropped += 1
            node = parent
        self.num_nodes -= num_dropped
        return num_dropped

    def prune_condemned(self, most: int) -> int:
        """Continue bounded prunes, for at most `most` nodes; returns how many were dropped."""
        num_dropped = 0
        while self._condemned and num_dropped < most:
            num_dropped += self.prune(self._condemned.popleft(), most - num_dropped)
        return num_dropped

    @property
    def has_condemned(self) -> bool:
        """Whether `prune_condemned` has anything to do."""
        return bool(self._condemned)

    def is_condemned(self, node: Node) -> bool:
        """Whether the node waits for `prune_condemned`."""
        return node in self._condemned

    def begin_walk(self, *, in_portions: bool) -> Walk:
        """Begin a walk through all nodes. With `in_portions` the tree may change on the way; then `end_walk` must follow."""
        if not in_portions:
            return Walk(self, 0)
        assert self.walk is None, "one walk in portions at a time"
        self._num_walks += 1
        self.walk = Walk(self, self._num_walks)
        return self.walk

    def end_walk(self, walk: Walk) -> None:
        """Notify this walk no longer. Idempotent."""
        if self.walk is walk:
            self.walk = None

    def latest_roots(self, salt: str | None, most: int) -> list[RootNode]:
        """Return up to `most` roots with that salt, or with any if it is None, latest first."""
        roots: Iterable[RootNode] = reversed(self._roots.values() if salt is None else self._salts.get(salt, {}))
        return list(islice(roots, most))

    def roots(self) -> list[RootNode]:
        """All roots, as of now."""
        return list(self._roots.values())

    def holds(self, node: Node) -> bool:
        """Whether the node was not pruned."""
        if isinstance(node, RootNode):
            return self._roots.get(node.key) is node
        return node.parent is not None


class Walk:
    """Visits all nodes, in portions between which nodes may be inserted and removed.

    Every node that exists from the beginning to the end is returned. A `number` other than 0 marks the nodes returned, and those
    inserted during the walk.
    """

    def __init__(self, tree: PrefixTree, number: int) -> None:
        self._tree = tree
        self._number = number
        self._nodes: list[Node] = [*tree.roots()]
        self._parts: list[tuple[Node, dict[bytes, Node]]] = []
        self.num_seen = 0
        """Nodes returned, the roots not counted."""
        self.num_unseen = tree.num_nodes
        """Nodes that are counted and not returned yet: 0 at the end, if the tree counts right and loses none."""

    def step(self) -> tuple[Node, list[Node]] | None:
        """The next node, with its children; None at the end. A node with a Fan is returned again with each part of it."""
        while self._nodes:
            node = self._nodes.pop()
            if not self._tree.holds(node):
                continue  # pruned since its parent was returned
            if node.depth >= 0 and not (self._number and node.seen == self._number):
                self.num_seen += 1
                self.num_unseen -= 1
            if self._number:
                node.seen = self._number
            if isinstance(node.children, Fan):
                self._parts += [(node, part) for part in node.children.parts]
                children = [] if node.child is None else [node.child]
            else:
                children = list(node.iter_children())
            self._nodes += children
            return node, children
        if self._parts:
            node, part = self._parts.pop()
            children = list(part.values())
            self._nodes += children
            return node, children
        return None

    def on_made(self, node: Node) -> None:
        """A node was inserted: it need not be returned."""
        node.seen = self._number

    def on_dropped(self, node: Node) -> None:
        """A node is removed."""
        if node.seen != self._number:
            self.num_unseen -= 1
