"""Reads everything that a walkthrough shows from the core."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.cache_service.core.block_pool import BlockPool, State
from kvpool.cache_service.core.manager import EPOCH_SHIFT
from kvpool.cache_service.core.messages import BlockCounts, GroupSpec
from kvpool.cache_service.core.prefix_tree import Node
from kvpool.cache_service.core.session import Sequence

from .words import Words
from .worker import WORKER_ID, Worker


class BlockView(NamedTuple):
    """The state of one block."""

    block: int
    state: State
    ref_count: int
    generation: int
    """Generation without the manager's epoch, counted from 1; 0: the block was never granted."""
    sealed: bool
    words: tuple[str, ...]
    """Words of a sealed block, else those that a live sequence has for it. Empty for a state."""
    is_scratch: bool = False
    """Whether it is held without a place in a table: only its worker knows the content."""
    num_tokens: int = 0
    """Tokens that the state of a snapshot has seen; 0: it is no snapshot."""

    @property
    def role(self) -> str:
        """State of the block in a word."""
        return "scratch" if self.is_scratch else self.state.name.lower()


class EntryView(NamedTuple):
    """One entry of a block table: the block, the words in it, and whether it is sealed."""

    block: int
    words: tuple[str, ...]
    sealed: bool
    table_index: int


class TableView(NamedTuple):
    """The blocks of a live sequence in one group."""

    sequence_id: str
    entries: tuple[EntryView, ...]
    """Entries of the table; in a group with a window or a state only the named ones."""
    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    scratch: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    """Lengths in tokens at which it still has to name a window or a snapshot."""


class GroupView(NamedTuple):
    """One group: its pool, and the blocks of each live sequence."""

    group: GroupSpec
    counts: BlockCounts
    num_evicted: int
    blocks: tuple[BlockView, ...]
    """Blocks by block_id, the null block included."""
    tables: tuple[TableView, ...]
    """Tables in the order in which the sequences came."""
    free_list: tuple[int, ...]
    """Free blocks, the next to be granted first."""


class NodeView(NamedTuple):
    """A node of the prefix tree with its descendants; `block_hash` is None until some block of it was sealed."""

    words: tuple[str, ...]
    block_hash: int | None
    block: int
    """The block of the first group that serves hits; 0 if there is none."""
    leaders: tuple[str, ...]
    """Sequences that are computing it."""
    children: tuple[NodeView, ...]


class Snapshot(NamedTuple):
    """The manager's state between two calls."""

    block_size: int
    groups: tuple[GroupView, ...]
    roots: tuple[NodeView, ...]
    """Roots of the prefix tree; their `words` are empty."""


def take_snapshot(worker: Worker) -> Snapshot:
    """Read the whole state; changes nothing."""
    return Snapshot(
        worker.layout.block_size,
        tuple(_group_view(worker, pool) for pool in worker.session.pools),
        tuple(_node_view(root, worker.pool, worker.words) for root in _roots(worker)),
    )


def counter(generation: int) -> int:
    """Return a generation without the manager's epoch, with which it begins."""
    return generation & ((1 << EPOCH_SHIFT) - 1)


def _group_view(worker: Worker, pool: BlockPool) -> GroupView:
    group = worker.layout.groups[pool.slot]
    tables = tuple(_table_view(worker, pool, sequence) for sequence in worker.session.sequences.values())
    return GroupView(
        group,
        pool.counts(),
        pool.num_evicted,
        tuple(_blocks(worker, pool, group, tables)),
        tables,
        tuple(pool.free_list()),
    )


def _blocks(worker: Worker, pool: BlockPool, group: GroupSpec, tables: tuple[TableView, ...]) -> list[BlockView]:
    words_by_block = {entry.block: entry.words for table in tables for entry in table.entries}
    scratch = {block for table in tables for block in table.scratch}
    blocks = [BlockView(0, pool.state(0), pool.ref_count(0), counter(pool.generation(0)), False, ())]
    for description in worker.manager.describe_blocks(WORKER_ID, group=pool.slot):
        block = description.block
        node = pool.node(block)
        words = words_by_block.get(block, ())
        if node is not None:
            words = () if group.grid_blocks else worker.words.decode(node.tokens)
        num_tokens = 0
        if node is not None and group.grid_blocks:
            num_tokens = (node.depth + 1) * worker.layout.block_size
        blocks.append(
            BlockView(
                block,
                description.state,
                description.ref_count,
                counter(description.generation),
                description.sealed,
                words,
                block in scratch,
                num_tokens,
            )
        )
    return blocks


def _table_view(worker: Worker, pool: BlockPool, sequence: Sequence) -> TableView:
    words, size = worker.words.decode(sequence.tokens), worker.layout.block_size
    if worker.layout.groups[pool.slot].grid_blocks:
        words = ()
    group = sequence.session.by_slot[pool.slot]
    places = list(group.places(sequence))
    return TableView(
        sequence.key.sequence_id,
        tuple(
            EntryView(block, words[index * size : (index + 1) * size], pool.node(block) is not None, index)
            for index, block in sorted((index, block) for index, block in places if index is not None)
        ),
        sequence.num_tokens,
        sequence.num_cached_tokens,
        sequence.num_computed_tokens,
        tuple(block for index, block in places if index is None),
        tuple(boundary * size for boundary in sequence.boundaries) if group.is_dependent else (),
    )


def _roots(worker: Worker) -> list[Node]:
    """Return the roots of all cached blocks and live sequences, in the order of the blocks."""
    roots: dict[Node, None] = {}
    for pool in worker.session.pools:
        for block in range(1, pool.num_blocks):
            node = pool.node(block)
            while node is not None:
                if node.parent is None:
                    roots[node] = None
                node = node.parent
    for sequence in worker.session.sequences.values():
        roots[sequence.root] = None
    return list(roots)


def _node_view(node: Node, pool: BlockPool, words: Words) -> NodeView:
    return NodeView(
        () if node.parent is None else words.decode(node.tokens),
        node.block_hash,
        pool.copy_of(node),
        tuple(leader.key.sequence_id for leader in node.iter_leaders()),
        tuple(_node_view(child, pool, words) for child in node.iter_children()),
    )
