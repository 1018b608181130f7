"""Puts the content of the cache together from the messages of Watch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.v1 import cache_pb2, common_pb2

from .errors import ProtocolError


@dataclass(slots=True)
class ContentNode:
    """The tokens of one block after one prefix."""

    node: int
    """Number of the node, valid as long as it is listed."""
    parent: ContentNode | None
    """Node of the block before; None: it begins a chain."""
    root: common_pb2.Root | None
    """Root of the chain without the salt, in the node that begins the chain; otherwise None."""
    salt_number: int
    """Number of the tenant's salt, in the node that begins a chain; 0: none."""
    tokens: bytes
    """block_size little-endian uint32 token ids."""
    block_hash: int
    """xxh64 of the chain, as a name: it does not prove that the tokens are equal."""
    sessions: dict[int, str] = field(default_factory=dict)
    """Worker's name by session, for each worker that has it in any group; empty: it is listed only because its children are."""
    groups: dict[int, set[int]] = field(default_factory=dict)
    """Groups that have it, by session. It is a hit if all groups of the worker have it and everything before it."""
    children: dict[int, ContentNode] = field(default_factory=dict)
    """Nodes of the blocks that come next, by number."""
    num_served_tokens: int = 0
    """Prompt tokens served by hits that reach this node, since the view began."""

    def path(self) -> list[ContentNode]:
        """Return the nodes from the beginning of the chain to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


class ContentsView:
    """The content of the cache. Apply each message that `Client.watch(contents=True)` yields; before `is_complete` a part is
    missing."""

    def __init__(self) -> None:
        self.nodes: dict[int, ContentNode] = {}
        """Nodes by number: those that some worker has, and all that come before them."""
        self.epoch = 0
        """Epoch of the manager, which changes when it restarts."""
        self.number = 0
        """Number of the last event applied."""
        self.is_complete = False
        """Whether the whole state has come."""

    def apply(self, contents: cache_pb2.Contents) -> None:
        """Take in the next message, in time in proportion to its events and the depth of the hits. Raises ProtocolError if it does
        not join on."""
        if contents.whole_begins:
            self.nodes.clear()
            self.is_complete = False
        self.epoch = contents.epoch
        for event in contents.events:
            self._apply_event(event)
            self.number = event.number
        if contents.whole_ends:
            self.is_complete = True

    def beginnings(self) -> Iterator[ContentNode]:
        """Iterate over the nodes that begin a chain."""
        return (node for node in self.nodes.values() if node.parent is None)

    def _apply_event(self, event: cache_pb2.ContentEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "stored":
            self._store(event.stored)
        elif kind == "removed":
            self._remove(event.removed)
        elif kind == "cleared":
            for holder in self.nodes.values():
                holder.sessions.pop(event.cleared.session, None)
                holder.groups.pop(event.cleared.session, None)
        elif kind == "served":
            node = self.nodes.get(event.served.node)
            while node is not None:
                node.num_served_tokens += event.served.num_cached_tokens
                node = node.parent

    def _store(self, stored: cache_pb2.ContentStored) -> None:
        node = self.nodes.get(stored.node)
        if node is None:
            parent = self.nodes.get(stored.parent)
            if parent is None and stored.parent:
                raise ProtocolError(
                    f"content {stored.node} came before its parent {stored.parent}", reason="OUT_OF_ORDER"
                )
            node = ContentNode(
                stored.node,
                parent,
                stored.root if stored.HasField("root") else None,
                stored.salt_number,
                stored.tokens,
                stored.block_hash,
            )
            self.nodes[stored.node] = node
            if parent is not None:
                parent.children[stored.node] = node
        if stored.session:
            node.sessions[stored.session] = stored.worker_id
            node.groups.setdefault(stored.session, set()).add(stored.group)

    def _remove(self, removed: cache_pb2.ContentRemoved) -> None:
        node = self.nodes.get(removed.node)
        if node is None:
            return
        groups = node.groups.get(removed.session, set())
        groups.discard(removed.group)
        if not groups:
            node.groups.pop(removed.session, None)
            node.sessions.pop(removed.session, None)
        if removed.forgotten:
            del self.nodes[removed.node]
            if node.parent is not None:
                del node.parent.children[removed.node]
                node.parent = None
