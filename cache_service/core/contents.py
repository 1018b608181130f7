"""What look-ups can find, as a journal: numbered events of what became a hit, what stopped being one, and what was served.

It exists while somebody follows it (`CacheManager.follow_contents`); else the tree's `journal` is None, and each place that would
report something compares with None once. Nodes have numbers here and not hashes, because hashes can be equal by chance.

A node is listed for a pool when its first block there is sealed, and removed when the last one is given to something else; that
another block of the pool takes over is no event. A session that has not reported its sequences is not listed: look-ups do not see
it. When it has, and when a journal begins, what the pools hold already is listed in slices (`list_some`); events of these pools
come in between, in an order in which parents come before children. A node that was listed is forgotten when the tree prunes it.

To note an event is part of every Append while somebody follows, so of the most frequent one, Stored, the ring keeps what cannot
change (`_Kept`); the event itself is made for who reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .block_pool import BlockPool
from .copies import Holder
from .messages import Root, SequenceKey
from .prefix_tree import Node, RootNode
from .salts import SaltNumbers
from .session import Session


class Stored(NamedTuple):
    """The pool of a session's group holds this content now. Without a session: no pool does, but one has content after it."""

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
    group: int = 0
    sequence: SequenceKey | None = None


class Removed(NamedTuple):
    """The pool of the session's group holds it no longer; session 0: no pool did. `forgotten`: the node is not in the tree any
    more."""

    number: int
    node: int
    session: int
    group: int = 0
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
    """What is known of a node that has a number."""

    number: int
    parent: int
    """Number of its parent; 0: a root."""
    root: RootNode | None = None
    """The root, if it is the parent, and then the number of its salt."""
    salt_number: int = 0


class _Name(NamedTuple):
    """A pool in events, which must not keep a session that has ended."""

    session: int
    worker_id: str
    group: int


_NO_POOL = _Name(0, "", 0)


class _Kept(NamedTuple):
    """What the ring has of a Stored."""

    node: Node
    listed: _Listed
    pool: _Name
    sequence: SequenceKey | None


class _Pool:
    """A pool that look-ups see."""

    __slots__ = ("listed", "name", "pool", "position")

    def __init__(self, session: Session, pool: BlockPool) -> None:
        self.name = _Name(session.number, session.worker_id, pool.slot)
        self.pool = pool
        self.position = 1
        """The first block that `list_some` has not looked at."""
        self.listed: set[Node] | None = set()
        """Nodes listed so far; None: all that it holds."""

    def has_listed(self, node: Node) -> bool:
        """Whether events so far say that the pool holds the node."""
        return self.pool.copy_of(node) != 0 and (self.listed is None or node in self.listed)


class Contents:
    """The journal."""

    def __init__(
        self, capacity: int, sessions: Iterable[Session], *, last_number: int, last_node: int, salts: SaltNumbers
    ) -> None:
        """`capacity`: events kept for followers that are late; `sessions`: those that look-ups see. `last_number` and `last_node`:
        where its numbers continue, because those of an earlier journal of this epoch must not come again."""
        self._capacity = capacity
        self._ring: list[_Kept | Event | None] = [None] * capacity
        self._first = last_number + 1
        """The first event of this journal."""
        self.last_number = last_number
        self.last_node = last_node
        self._read = last_number
        """The last event that somebody may know of: it must not change any more."""
        self._salts = salts
        self._nodes: dict[Node, _Listed] = {}
        """Nodes with a number, parents before children."""
        self._pools: dict[Holder, tuple[_Pool, ...]] = {}
        """The listed pools of each holder, by slot."""
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
        pools = self._pools[session.holder] = tuple(_Pool(session, pool) for pool in session.pools)
        for of, group in zip(pools, session.by_slot, strict=True):
            if group.holds_nodes:
                self._pending[of] = None
            else:
                of.listed = None

    def close(self, session: Session) -> None:
        """The session has ended."""
        pools = self._pools.pop(session.holder, ())
        for pool in pools:
            self._pending.pop(pool, None)
        if pools:
            self._add(Cleared(self.last_number + 1, session.number, session.worker_id))

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
        """The sequence has computed nodes[begin:end], in the blocks of its table at the same places. Where another block of the
        pool has the content already, nothing has changed."""
        pools = self._pools.get(holder)
        if pools is None:
            return
        of = pools[slot]
        name, known, is_complete = of.name, self._nodes, of.listed is None
        for index in range(begin, end):
            node = nodes[index]
            if node.copy_in(holder, slot) != table[index]:
                continue
            listed = known.get(node)
            if listed is None and is_complete:
                # All that the pool holds is listed, so a parent with a number needs no event.
                if isinstance(node.parent, RootNode):
                    listed = self._number(node)
                elif node.parent is not None and (above := known.get(node.parent)):
                    self.last_node = number = self.last_node + 1
                    listed = known[node] = _Listed(number, above.number)
            if listed is None or not is_complete:
                self._list(of, node, key)
            else:
                self._add(_Kept(node, listed, name, key))

    def restored(self, node: Node, holder: Holder, slot: int) -> None:
        """A pool that look-ups see has got the node out of a report."""
        pools = self._pools.get(holder)
        if pools is not None:
            self._list_path(pools[slot], node, None, -1, is_new=True)

    def removed(self, node: Node, holder: Holder, slot: int) -> None:
        """The pool is about to lose its last copy of the node. To be called before the copy is dropped."""
        pools = self._pools.get(holder)
        if pools is None:
            return
        of = pools[slot]
        if of.listed is not None:
            if node not in of.listed:
                return
            of.listed.discard(node)
        self._add(Removed(self.last_number + 1, self._nodes[node].number, of.name.session, slot))

    def served(
        self, key: SequenceKey, holder: Holder, node: Node | None, num_cached_tokens: int, num_prompt_tokens: int
    ) -> None:
        """A sequence was granted blocks."""
        pools = self._pools.get(holder)
        if pools is None:
            return
        number = 0
        if node is not None:
            for of in pools:
                if of.listed is not None:
                    self._list(of, node, None)
            number = self._nodes[node].number
        self._add(
            Served(self.last_number + 1, key, pools[0].name.session, number, num_cached_tokens, num_prompt_tokens)
        )

    def dropped(self, node: Node) -> None:
        """The tree has pruned the node."""
        listed = self._nodes.pop(node, None)
        if listed is None:
            return
        place = self.last_number % self._capacity
        last = self._ring[place]
        if isinstance(last, Removed) and last.node == listed.number and self.last_number > self._read:
            # As nearly always: an eviction prunes its node. One event is enough, unless it was read before the node went.
            self._ring[place] = Removed(last.number, last.node, last.session, last.group, forgotten=True)
        else:
            self._add(Removed(self.last_number + 1, listed.number, 0, forgotten=True))

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
            if node is not None and pool.copy_of(node) == of.position:
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

    def _list_path(
        self, of: _Pool, node: Node, key: SequenceKey | None, most: int, *, is_new: bool = False
    ) -> tuple[int, bool]:
        """List at most `most` nodes of the way to `node`, from the top; −1: all. Returns how many, and whether that is all.
        `is_new`: the pool has only just got it; so it is with a `key`, of the sequence that has computed it."""
        path = []
        step: Node | None = node
        is_new = is_new or key is not None
        while step is not None and step.depth >= 0 and not self._is_known(of, step, step is node and is_new):
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
        return of.pool.copy_of(node) == 0 or of.has_listed(node)

    def _list_one(self, of: _Pool, node: Node, key: SequenceKey | None) -> None:
        if node not in self._nodes:
            self._number(node)
        name = _NO_POOL
        if of.pool.copy_of(node):
            if of.listed is not None:
                of.listed.add(node)
            name = of.name
        else:
            key = None
        self._add(_Kept(node, self._nodes[node], name, key))

    def _number(self, node: Node) -> _Listed:
        """Give a node its number; its parent has one or is a root."""
        parent = node.parent
        assert parent is not None, "a listed node is in the tree"
        self.last_node = number = self.last_node + 1
        if isinstance(parent, RootNode):
            listed = _Listed(number, 0, parent, self._salts.number(parent.key[0].tenant_salt))
        else:
            listed = _Listed(number, self._nodes[parent].number)
        self._nodes[node] = listed
        return listed

    # -- following

    def _add(self, event: _Kept | Event) -> None:
        self.last_number = number = self.last_number + 1
        self._ring[number % self._capacity] = event

    def since(self, number: int, most: int) -> list[Event] | None:
        """The events after `number`, at most `most`; None if they are not kept any more, or `number` is none that was given."""
        oldest = max(self._first, self.last_number - self._capacity + 1)
        if not oldest - 1 <= number <= self.last_number:
            return None
        last = min(self.last_number, number + most)
        self._read = max(self._read, last)
        return [_event(n, self._ring[n % self._capacity]) for n in range(number + 1, last + 1)]

    def whole(self) -> Whole:
        """All that is listed now, to be taken in parts. Then follow the events after its `number`."""
        self._read = self.last_number
        return Whole(self, self.last_number, list(self._nodes), list(self._nodes.values()))

    def _stored_everywhere(self, node: Node, listed: _Listed) -> list[Stored]:
        """The node as it is now: once for each session that holds it, once without one if none does."""
        if self._nodes.get(node) is not listed:
            # Pruned since, and the event that says so follows. Until then others may name it as their parent.
            return [_stored(self.last_number, node, listed, _NO_POOL)]
        names = [of.name for holder in node.holders() for of in self._pools.get(holder, ()) if of.has_listed(node)]
        return [_stored(self.last_number, node, listed, name) for name in names or (_NO_POOL,)]


def _event(number: int, event: _Kept | Event | None) -> Event:
    """An event out of what the ring has of it."""
    assert event is not None, "an event of this journal"
    return _stored(number, *event) if isinstance(event, _Kept) else event


def _stored(number: int, node: Node, listed: _Listed, pool: _Name, key: SequenceKey | None = None) -> Stored:
    node_number, parent, root_node, salt_number = listed
    root, block_size = None, 0
    if root_node is not None:
        root, block_size = root_node.key
        root = root._replace(tenant_salt="")
    block_hash = node.block_hash or 0
    return Stored(
        number, node_number, parent, root, salt_number, node.tokens, block_hash, block_size, *pool, sequence=key
    )


class Whole:
    """The whole state, parents before children, in parts between which anything may happen.

    A part shows each node as it is when the part is taken. All of it is right for one moment once the events up to then have
    followed.
    """

    def __init__(self, contents: Contents, number: int, nodes: list[Node], listed: list[_Listed]) -> None:
        self._contents = contents
        self.number = number
        """Number of the last event before this snapshot."""
        # Two lists, because a list of pairs of 100,000 nodes takes several times as long.
        self._nodes = nodes
        self._listed = listed
        self._position = 0

    def part(self, count: int) -> list[Stored]:
        """The next `count` nodes; empty after the last."""
        begin, self._position = self._position, self._position + count
        found = []
        for node, listed in zip(self._nodes[begin : self._position], self._listed[begin : self._position], strict=True):
            found += [stored._replace(number=self.number) for stored in self._contents._stored_everywhere(node, listed)]
        return found
