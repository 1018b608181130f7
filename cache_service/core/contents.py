"""What look-ups can find, as a journal: numbered events of what became a hit, what stopped being one, and what was served.

It exists while somebody follows it (`CacheManager.follow_contents`); else the tree's `journal` is None, and each place that would
report something compares with None once. Nodes have numbers here and not hashes, because hashes can be equal by chance.

A node is listed for a pool when its first block there is sealed, and removed when the last one is given to something else; that
another block of the pool takes over is no event. A session whose report is not complete is not listed: look-ups do not see it. When
it is, and when a journal begins, what the pools hold already is listed in slices (`list_some`); events of these pools come in
between, in an order in which parents come before children. A node that was listed is forgotten when the tree prunes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .block_pool import BlockPool
from .messages import Root, SequenceKey
from .prefix_tree import Holder, Node, RootNode
from .salts import SaltNumbers
from .session import Session


class Stored(NamedTuple):
    """A session's pool holds this content now. Without a session: no pool does, but one has content after it."""

    number: int
    node: int
    parent: int
    root: Root | None
    salt_number: int
    tokens: bytes
    block_hash: int
    block_size: int
    session: int = 0
    worker_id: str = ""
    sequence: SequenceKey | None = None


class Removed(NamedTuple):
    """The session's pool holds it no longer; session 0: no pool did. `forgotten`: the node is not in the tree any more."""

    number: int
    node: int
    session: int
    forgotten: bool = False


class Cleared(NamedTuple):
    """The session has ended."""

    number: int
    session: int
    worker_id: str


class Served(NamedTuple):
    """A sequence was granted blocks; `node`: the deepest content that it was served from the cache, 0 if none."""

    number: int
    sequence: SequenceKey
    session: int
    node: int
    num_cached_tokens: int
    num_prompt_tokens: int


Event = Stored | Removed | Cleared | Served


class _Listed(NamedTuple):
    """The number of a node, and that of its parent (0: a root)."""

    node: int
    parent: int


class _Pool:
    """A pool that look-ups see."""

    __slots__ = ("listed", "pool", "position", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.pool: BlockPool = session.pool
        self.position = 1
        """The first block that `list_some` has not looked at."""
        self.listed: set[Node] | None = set()
        """Nodes listed so far; None: all that it holds."""

    def has_listed(self, node: Node) -> bool:
        """Whether events so far say that the pool holds the node."""
        return node.copy_in(self.pool) != 0 and (self.listed is None or node in self.listed)


class Contents:
    """The journal."""

    def __init__(
        self, capacity: int, sessions: Iterable[Session], *, last_number: int, last_node: int, salts: SaltNumbers
    ) -> None:
        """`capacity`: events kept for followers that are late; `sessions`: those that look-ups see. `last_number` and `last_node`:
        where its numbers continue, because those of an earlier journal of this epoch must not come again."""
        self._capacity = capacity
        self._ring: list[Event | None] = [None] * capacity
        self._first = last_number + 1
        """The first event of this journal."""
        self.last_number = last_number
        self.last_node = last_node
        self._read = last_number
        """The last event that somebody may know of: it must not change any more."""
        self._salts = salts
        self._nodes: dict[Node, _Listed] = {}
        """Nodes with a number, parents before children."""
        self._pools: dict[Holder, _Pool] = {}
        self._pending: dict[_Pool, None] = {}
        """Pools that `list_some` has not finished."""
        for session in sessions:
            self.open(session)

    @property
    def num_nodes(self) -> int:
        """Nodes with a number."""
        return len(self._nodes)

    @property
    def is_complete(self) -> bool:
        """Whether all that the pools hold is listed."""
        return not self._pending

    # -- what happens

    def open(self, session: Session) -> None:
        """Look-ups see the session from now on; what it holds is listed by `list_some`."""
        pool = self._pools[session.pool] = _Pool(session)
        self._pending[pool] = None

    def close(self, session: Session) -> None:
        """The session has ended."""
        pool = self._pools.pop(session.pool, None)
        if pool is not None:
            self._pending.pop(pool, None)
            self._add(Cleared(self.last_number + 1, session.number, session.worker_id))

    def sealed(self, key: SequenceKey, pool: Holder, nodes: Iterable[Node]) -> None:
        """The pool has its first copy of each of these nodes, computed by the sequence."""
        of = self._pools.get(pool)
        if of is not None:
            for node in nodes:
                self._list(of, node, key)

    def removed(self, node: Node, pool: Holder) -> None:
        """The pool is about to lose its last copy of the node. To be called before the copy is dropped."""
        of = self._pools.get(pool)
        if of is not None and of.has_listed(node):
            if of.listed is not None:
                of.listed.discard(node)
            self._add(Removed(self.last_number + 1, self._nodes[node].node, of.session.number))

    def served(
        self, key: SequenceKey, pool: Holder, node: Node | None, num_cached_tokens: int, num_prompt_tokens: int
    ) -> None:
        """A sequence was granted blocks."""
        of = self._pools.get(pool)
        if of is None:
            return
        number = 0
        if node is not None:
            self._list(of, node, None)
            number = self._nodes[node].node
        self._add(Served(self.last_number + 1, key, of.session.number, number, num_cached_tokens, num_prompt_tokens))

    def dropped(self, node: Node) -> None:
        """The tree has pruned the node."""
        listed = self._nodes.pop(node, None)
        if listed is None:
            return
        last = self._ring[self.last_number % self._capacity]
        if isinstance(last, Removed) and last.node == listed.node and self.last_number > self._read:
            # As nearly always: an eviction prunes its node. One event is enough, unless it was read before the node went.
            self._ring[self.last_number % self._capacity] = last._replace(forgotten=True)
        else:
            self._add(Removed(self.last_number + 1, listed.node, 0, forgotten=True))

    # -- listing

    def list_some(self, budget: int) -> bool:
        """List what pools hold already: about `budget` blocks of them. Returns whether more is left."""
        while self._pending and budget > 0:
            of = next(iter(self._pending))
            budget = self._list_pool(of, budget)
            if of.position >= of.pool.num_known:
                of.listed = None
                del self._pending[of]
        return bool(self._pending)

    def _list_pool(self, of: _Pool, budget: int) -> int:
        """Returns what is left of the budget."""
        pool = of.pool
        while of.position < pool.num_known and budget > 0:
            node = pool.node(of.position)
            if node is not None and node.copy_in(pool) == of.position:
                num_listed, is_done = self._list_path(of, node, None, budget)
                budget -= num_listed
                if not is_done:
                    return 0
            budget -= 1
            of.position += 1
        return budget

    def _list(self, of: _Pool, node: Node, key: SequenceKey | None) -> None:
        """List a node that the pool holds, unless it is listed, after its ancestors."""
        self._list_path(of, node, key, -1)

    def _list_path(self, of: _Pool, node: Node, key: SequenceKey | None, most: int) -> tuple[int, bool]:
        """List at most `most` nodes of the way to `node`, from the top; −1: all. Returns how many, and whether that is all."""
        path = []
        step: Node | None = node
        while step is not None and step.depth >= 0 and not self._is_known(of, step, step is node and key is not None):
            path.append(step)
            step = step.parent
        for index, step in enumerate(reversed(path)):
            if index == most:
                return index, False
            self._list_one(of, step, key if step is node else None)
        return len(path), True

    def _is_known(self, of: _Pool, node: Node, is_new: bool) -> bool:
        """Whether there is nothing to list: the node has a number and, if the pool holds it, is listed for the pool. `is_new`: it
        has only just come to the pool."""
        if is_new or node not in self._nodes:
            return False
        return node.copy_in(of.pool) == 0 or of.has_listed(node)

    def _list_one(self, of: _Pool, node: Node, key: SequenceKey | None) -> None:
        parent = node.parent
        assert parent is not None, "a listed node is in the tree"
        if node not in self._nodes:
            self.last_node += 1
            above = 0 if isinstance(parent, RootNode) else self._nodes[parent].node
            self._nodes[node] = _Listed(self.last_node, above)
        if node.copy_in(of.pool):
            if of.listed is not None:
                of.listed.add(node)
            session = of.session
            self._add(self._stored(self.last_number + 1, node, session.number, session.worker_id, key))
        else:
            self._add(self._stored(self.last_number + 1, node))

    def _stored(
        self, number: int, node: Node, session: int = 0, worker_id: str = "", key: SequenceKey | None = None
    ) -> Stored:
        listed, parent = self._nodes[node], node.parent
        root, salt_number, block_size = None, 0, 0
        if isinstance(parent, RootNode):
            root, block_size = parent.key
            salt_number = self._salts.number(root.tenant_salt)
            root = root._replace(tenant_salt="")
        return Stored(
            number,
            listed.node,
            listed.parent,
            root,
            salt_number,
            node.tokens,
            node.block_hash or 0,
            block_size,
            session,
            worker_id,
            key,
        )

    # -- following

    def _add(self, event: Event) -> None:
        self.last_number += 1
        self._ring[self.last_number % self._capacity] = event

    def since(self, number: int, most: int) -> list[Event] | None:
        """The events after `number`, at most `most`; None if they are not kept any more, or `number` is none that was given."""
        oldest = max(self._first, self.last_number - self._capacity + 1)
        if not oldest - 1 <= number <= self.last_number:
            return None
        last = min(self.last_number, number + most)
        self._read = max(self._read, last)
        found = [self._ring[n % self._capacity] for n in range(number + 1, last + 1)]
        return [event for event in found if event is not None]

    def whole(self) -> Whole:
        """All that is listed now, to be taken in parts. Then follow the events after its `number`."""
        self._read = self.last_number
        return Whole(self, self.last_number, list(self._nodes), list(self._nodes.values()))

    def _stored_everywhere(self, node: Node, listed: _Listed) -> list[Stored]:
        """The node as it is now: once for each session that holds it, once without one if none does."""
        if self._nodes.get(node) is not listed:
            # Pruned since, and the event that says so follows. Until then others may name it as their parent.
            return [Stored(self.last_number, listed.node, listed.parent, None, 0, node.tokens, node.block_hash or 0, 0)]
        sessions = [
            self._pools[pool].session
            for pool in node.pools()
            if pool in self._pools and self._pools[pool].has_listed(node)
        ]
        if not sessions:
            return [self._stored(self.last_number, node)]
        return [self._stored(self.last_number, node, one.number, one.worker_id) for one in sessions]


class Whole:
    """The whole state, parents before children, in parts between which anything may happen.

    A part shows each node as it is when the part is taken. All of it is right for one moment once the events up to then have
    followed.
    """

    def __init__(self, contents: Contents, number: int, nodes: list[Node], listed: list[_Listed]) -> None:
        self._contents = contents
        self.number = number
        """Of the last event before."""
        # Two lists, because a list of pairs of 100,000 nodes takes several times as long.
        self._nodes = nodes
        self._listed = listed
        self._position = 0

    def part(self, count: int) -> list[Stored]:
        """The next `count` nodes; empty after the last."""
        begin, self._position = self._position, self._position + count
        found = []
        for node, listed in zip(
            self._nodes[begin : self._position], self._listed[begin : self._position], strict=True
        ):
            found += [stored._replace(number=self.number) for stored in self._contents._stored_everywhere(node, listed)]
        return found
