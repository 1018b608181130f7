"""Reads everything that a walkthrough shows from the manager's core, as plain values for a picture or for JSON, and finds what a
step has changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvpool.cache_service.core.manager import EPOCH_SHIFT
from kvpool.cache_service.core.messages import BlockCounts
from kvpool.cache_service.core.prefix_tree import Node

from .layouts import BLOCK_SIZE, Kind
from .worker import WORKER_ID, Worker


class BlockView(NamedTuple):
    block: int
    state: str
    """free, cached, held or reserved."""
    ref_count: int
    generation: int
    """Generation without the manager's epoch, counted from 1; 0: the block was never granted."""
    sealed: bool
    words: tuple[str, ...]
    """Words of a sealed block, else those that a live sequence has for it. Of a snapshot: after how many tokens it was taken."""
    owners: tuple[str, ...]
    """Sequences that use it, in the order in which they came."""
    is_scratch: bool = False
    """Whether it is held without a place in a table: only its worker knows the content."""

    @property
    def role(self) -> str:
        """State of the block in a word."""
        return "scratch" if self.is_scratch else self.state


class TableView(NamedTuple):
    """The blocks of a live sequence in one group."""

    sequence: str
    entries: dict[int, int]
    """Blocks by table index; in a group with a window or a state only the named ones."""
    scratch: tuple[int, ...]
    """Blocks without a place."""
    boundaries: tuple[int, ...]
    """Lengths in tokens at which it still has to name a window or a snapshot."""
    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


class GroupView(NamedTuple):
    """One group: its pool, and the blocks of each live sequence."""

    kind: Kind
    counts: BlockCounts
    num_evicted: int
    blocks: tuple[BlockView, ...]
    """Blocks by block_id, the null block included."""
    tables: tuple[TableView, ...]
    """Tables in the order in which the sequences came."""
    free_list: tuple[int, ...]
    """Free blocks, the next to be granted first."""


class NodeView(NamedTuple):
    """A node of the prefix tree."""

    depth: int
    """0: the root."""
    words: tuple[str, ...]
    block_hash: int | None
    """None until some block of it was sealed."""
    block: int
    """The block of the first group that serves hits; 0 if there is none."""
    leaders: tuple[str, ...]
    """Sequences that are computing it."""


class Snapshot(NamedTuple):
    """The manager's state between two calls."""

    groups: tuple[GroupView, ...]
    tree: tuple[NodeView, ...]
    """The prefix tree, each node before its children."""


def take_snapshot(worker: Worker) -> Snapshot:
    """Read the whole state; changes nothing."""
    groups = tuple(_group_view(worker, slot, kind) for slot, kind in enumerate(worker.layout))
    root = _root(worker)
    return Snapshot(groups, () if root is None else tuple(_walk(root, 0, worker)))


def counter(generation: int) -> int:
    """Return a generation without the manager's epoch, with which it begins."""
    return generation & ((1 << EPOCH_SHIFT) - 1)


def _group_view(worker: Worker, slot: int, kind: Kind) -> GroupView:
    pool = worker.session.pools[slot]
    tables = tuple(
        TableView(
            sequence.key.sequence_id,
            worker.named(sequence.key.sequence_id, slot),
            worker.scratch(sequence.key.sequence_id, slot),
            worker.boundaries(sequence.key.sequence_id) if kind is not Kind.FULL else (),
            sequence.num_tokens,
            sequence.num_cached_tokens,
            sequence.num_computed_tokens,
        )
        for sequence in worker.session.sequences.values()
    )
    blocks = _blocks(worker, slot, kind, tables)
    return GroupView(kind, pool.counts(), pool.num_evicted, blocks, tables, tuple(pool.free_list()))


def _blocks(worker: Worker, slot: int, kind: Kind, tables: tuple[TableView, ...]) -> tuple[BlockView, ...]:
    pool = worker.session.pools[slot]
    scratch = {block for table in tables for block in table.scratch}
    unsealed = {} if kind is Kind.STATE else _words_in_tables(worker, tables)
    blocks = [BlockView(0, pool.state(0).name.lower(), pool.ref_count(0), counter(pool.generation(0)), False, (), ())]
    for described in worker.manager.describe_blocks(WORKER_ID, group=slot):
        node = pool.node(described.block)
        if node is None:
            words = unsealed.get(described.block, ())
        elif kind is Kind.STATE:
            words = ("after", str((node.depth + 1) * BLOCK_SIZE))
        else:
            words = worker.words.decode(node.tokens)
        blocks.append(
            BlockView(
                described.block,
                described.state.name.lower(),
                described.ref_count,
                counter(described.generation),
                described.sealed,
                words,
                tuple(owner.sequence_id for owner in described.owners),
                described.block in scratch,
            )
        )
    return tuple(blocks)


def _words_in_tables(worker: Worker, tables: tuple[TableView, ...]) -> dict[int, tuple[str, ...]]:
    """Return what the live sequences have for each block with a place."""
    words = {}
    for table in tables:
        text = worker.words.decode(worker.session.sequences[table.sequence, 1].tokens)
        for index, block in table.entries.items():
            words[block] = text[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
    return words


def _root(worker: Worker) -> Node | None:
    """Return the root of the prefix tree; None: there is nothing in it. A worker of a story has one root."""
    pool = worker.pool
    nodes = [*(node for block in range(1, pool.num_blocks) if (node := pool.node(block)) is not None)]
    nodes += [sequence.root for sequence in worker.session.sequences.values()]
    node = nodes[0] if nodes else None
    while node is not None and node.parent is not None:
        node = node.parent
    return node


def _walk(node: Node, depth: int, worker: Worker) -> Iterator[NodeView]:
    words = worker.words.decode(node.tokens) if depth else ()
    leaders = tuple(leader.key.sequence_id for leader in node.iter_leaders())
    yield NodeView(depth, words, node.block_hash, worker.pool.copy_of(node), leaders)
    for child in node.iter_children():
        yield from _walk(child, depth + 1, worker)


def changed_blocks(before: GroupView, after: GroupView) -> dict[int, str]:
    """Return the changed blocks, each with its change in words."""
    pairs = zip(before.blocks, after.blocks, strict=True)
    return {new.block: _difference(old, new) for old, new in pairs if old != new}


def _difference(old: BlockView, new: BlockView) -> str:
    parts = []
    granted_again = old.generation != new.generation
    if old.sealed and granted_again:
        parts.append("evicted")
    if old.sealed and not new.sealed and not granted_again:
        parts.append("emptied")
    if not old.sealed and new.sealed:
        parts.append("sealed")
    if old.role != new.role:
        is_hit = old.state == "cached" and new.state == "held" and not granted_again
        parts.append(f"{'hit, ' if is_hit else ''}{old.role} → {new.role}")
    elif old.ref_count != new.ref_count:
        parts.append(f"ref_count {old.ref_count} → {new.ref_count}")
    return ", ".join(parts) or ("granted again" if granted_again else "more words")
