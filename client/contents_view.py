"""What the cache holds, put together from the contents of Watch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.v1 import cache_pb2, common_pb2

from .errors import ProtocolError


@dataclass(slots=True)
class ContentNode:
    """The tokens of one block after one prefix."""

    node: int
    """Its name, for as long as it is listed."""
    parent: ContentNode | None
    """None: it begins a chain."""
    root: common_pb2.Root | None
    """Of the chain, without the salt; where the node begins one."""
    salt_number: int
    """Where the node begins a chain: number of the tenant's salt, 0 for none."""
    tokens: bytes
    """block_size little-endian uint32 token ids."""
    block_hash: int
    """xxh64 of the chain. A name, never a proof."""
    sessions: dict[int, str] = field(default_factory=dict)
    """Sessions whose worker has it in any group, with the worker's name; empty: it is listed for what comes after it."""
    groups: dict[int, set[int]] = field(default_factory=dict)
    """By session: the worker's groups that have it. It is a hit as far as all groups have it and what comes before it."""
    children: dict[int, ContentNode] = field(default_factory=dict)
    """By number."""
    num_served_tokens: int = 0
    """Tokens of prompts that ended here with what the cache had for them, since the view began."""

    def path(self) -> list[ContentNode]:
        """From the beginning of the chain to this node."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


class ContentsView:
    """Apply each message that `Client.watch(contents=True)` yields. Not right for any one moment until `is_complete`."""

    def __init__(self) -> None:
        self.nodes: dict[int, ContentNode] = {}
        """By number: what some worker has, and what it comes after."""
        self.epoch = 0
        """Of the manager; changes with its restart."""
        self.number = 0
        """Of the last event applied."""
        self.is_complete = False
        """Whether the whole state has come."""

    def apply(self, contents: cache_pb2.Contents) -> None:
        """Take in the next message. Raises ProtocolError if it does not join on."""
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
        """The nodes that begin a chain."""
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
        elif kind == "served" and (node := self.nodes.get(event.served.node)) is not None:
            node.num_served_tokens += event.served.num_cached_tokens

    def _store(self, stored: cache_pb2.ContentStored) -> None:
        known = self.nodes.get(stored.node)
        if known is None:
            parent = self.nodes.get(stored.parent)
            if parent is None and stored.parent:
                raise ProtocolError(
                    f"content {stored.node} came before its parent {stored.parent}", reason="OUT_OF_ORDER"
                )
            known = ContentNode(
                stored.node,
                parent,
                stored.root if stored.HasField("root") else None,
                stored.salt_number,
                stored.tokens,
                stored.block_hash,
            )
            self.nodes[stored.node] = known
            if parent is not None:
                parent.children[stored.node] = known
        if stored.session:
            known.sessions[stored.session] = stored.worker_id
            known.groups.setdefault(stored.session, set()).add(stored.group)

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
