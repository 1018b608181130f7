"""A follower of the contents, and what it must know: what look-ups can find."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvpool.cache_service.core.contents import Cleared, Event, Removed, Served, Stored
from kvpool.cache_service.core.manager import CacheManager
from kvpool.cache_service.core.messages import Root
from kvpool.cache_service.core.prefix_tree import Node, RootNode

Path = tuple[Root, int, tuple[bytes, ...]]
"""Root without its salt, block size, and the tokens of each block up to a node."""
Held = dict[tuple[int, int], set[tuple[int, Path]]]
"""By session: number of the salt, and path, of each node that is a hit there."""


@dataclass
class _Known:
    parent: int
    tokens: bytes
    root: Root | None
    block_size: int
    salt_number: int
    holders: set[tuple[int, int]] = field(default_factory=set)
    """Session and group."""


class ContentsFollower:
    """Reads the journal as a viewer does, sometimes late or cut off. `capacity` is small, so that it falls out of the ring."""

    def __init__(self, seed: int, capacity: int = 12) -> None:
        self._draw = random.Random(seed)
        self._capacity = capacity
        self._manager: CacheManager | None = None
        self._number = 0
        self._nodes: dict[int, _Known] = {}
        self.num_wholes = 0
        self.num_events = 0

    def follow(self, manager: CacheManager, *, now: bool = False) -> None:
        """Look at the journal, if it is time: `now`, or by chance. What is known must then be what is there."""
        if not now and self._draw.random() < 0.4:
            return
        if not now and self._draw.random() < 0.05:
            manager.end_contents()
        contents = manager.follow_contents(self._capacity)
        if manager is not self._manager:
            self._manager, self._number = manager, -1
        if self._draw.random() < 0.3 and not now:
            contents.list_some(self._draw.choice([1, 3]))  # part of a listing, between other calls
            return
        while contents.list_some(2):
            pass
        events = contents.since(self._number, 10**9)
        if events is None:
            self._take_whole(manager)
        else:
            self._take(events)
        self._check(manager)

    def _take_whole(self, manager: CacheManager) -> None:
        contents = manager.follow_contents(self._capacity)
        self.num_wholes += 1
        self._nodes = {}
        whole = contents.whole()
        while part := whole.part(2):
            for stored in part:
                assert stored.number == whole.number
                self._store(stored)
        self._number = whole.number
        events = contents.since(self._number, 10**9)
        assert events == [], "nothing has happened meanwhile"

    def _take(self, events: list[Event]) -> None:
        for event in events:
            self.num_events += 1
            assert event.number == self._number + 1, "events are numbered without a gap"
            self._number = event.number
            if isinstance(event, Stored):
                known = self._nodes.get(event.node)
                holder = (event.session, event.group)
                assert known is None or (event.session and holder not in known.holders), "nothing comes twice"
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            elif isinstance(event, Cleared):
                for known in self._nodes.values():
                    known.holders = {holder for holder in known.holders if holder[0] != event.session}
            else:
                assert isinstance(event, Served)
                holders = self._nodes[event.node].holders if event.node else set()
                groups = {group for session, group in holders if session == event.session}
                live = {session.number: session.holder for session in self._manager.sessions} if self._manager else {}
                if event.node and event.session in live:
                    holder_of = live[event.session]
                    assert groups == {*holder_of.whole_slots, *holder_of.dependent_slots}
                assert (event.node == 0) == (event.num_cached_tokens == 0)

    def _store(self, stored: Stored) -> None:
        known = self._nodes.get(stored.node)
        if known is None:
            assert stored.parent == 0 or stored.parent in self._nodes, "parents come before children"
            known = self._nodes[stored.node] = _Known(
                stored.parent, stored.tokens, stored.root, stored.block_size, stored.salt_number
            )
        assert (known.parent, known.tokens) == (stored.parent, stored.tokens)
        if stored.session:
            known.holders.add((stored.session, stored.group))

    def _remove(self, removed: Removed) -> None:
        known = self._nodes[removed.node]
        if removed.session:
            known.holders.remove((removed.session, removed.group))
        if removed.forgotten:
            assert not known.holders
            assert all(other.parent != removed.node for other in self._nodes.values()), "children are forgotten first"
            del self._nodes[removed.node]

    def _check(self, manager: CacheManager) -> None:
        found: Held = {}
        for known in self._nodes.values():
            for holder in known.holders:
                found.setdefault(holder, set()).add(self._path(known))
        assert found == held_by(manager), "what the events say is not what look-ups find"
        assert manager.contents is not None
        assert len(self._nodes) == manager.contents.num_nodes, "a node was forgotten, and no event says so"

    def _path(self, known: _Known) -> tuple[int, Path]:
        tokens = [known.tokens]
        while known.parent:
            known = self._nodes[known.parent]
            tokens.append(known.tokens)
        assert known.root is not None
        return known.salt_number, (known.root, known.block_size, tuple(reversed(tokens)))


def held_by(manager: CacheManager) -> Held:
    """What look-ups find, read from the pools."""
    held: Held = {}
    for session in manager.sessions:
        if session.recovering:
            continue
        for pool in session.pools:
            for block in range(1, pool.num_known):
                node = pool.node(block)
                if node is not None and pool.copy_of(node) == block:
                    held.setdefault((session.number, pool.slot), set()).add(_path_of(manager, node))
    return held


def _path_of(manager: CacheManager, node: Node) -> tuple[int, Path]:
    tokens = []
    step = node
    while not isinstance(step, RootNode):
        tokens.append(step.tokens)
        assert step.parent is not None
        step = step.parent
    root, block_size = step.key
    salt = manager.salts.number(root.tenant_salt)
    return salt, (root._replace(tenant_salt=""), block_size, tuple(reversed(tokens)))
