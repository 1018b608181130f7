"""Everything a walkthrough shows of the core, read from it in one go."""

from __future__ import annotations

from typing import NamedTuple

from ..core.block_pool import BlockPool, State
from ..core.manager import EPOCH_SHIFT
from ..core.messages import BlockCounts
from ..core.prefix_tree import Node
from .worker import BLOCK_SIZE, WORKER_ID, Words, Worker


class BlockView(NamedTuple):
    """One block."""

    block: int
    state: State
    ref_count: int
    generation: int
    """Counted from 1: without the epoch that leads the stamp. 0 if the block was never granted."""
    sealed: bool
    words: tuple[str, ...]
    """What it holds if it is sealed, else the words that a live sequence has for it."""


class EntryView(NamedTuple):
    """One entry of a block table: the block, the words in it, and whether it is sealed."""

    block: int
    words: tuple[str, ...]
    sealed: bool


class TableView(NamedTuple):
    """One live sequence."""

    sequence_id: str
    entries: tuple[EntryView, ...]
    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


class NodeView(NamedTuple):
    """A node of the prefix tree with its descendants; `block_hash` is None until some block of it was sealed."""

    words: tuple[str, ...]
    block_hash: int | None
    block: int
    """The block that serves hits; 0 if there is none."""
    leaders: tuple[str, ...]
    """Sequences that are computing it."""
    children: tuple[NodeView, ...]


class Snapshot(NamedTuple):
    """The manager's state between two calls."""

    block_size: int
    counts: BlockCounts
    num_evicted: int
    blocks: tuple[BlockView, ...]
    """By block_id, the null block included."""
    tables: tuple[TableView, ...]
    """In the order in which the sequences came."""
    free_list: tuple[int, ...]
    """From the next to be granted to the last."""
    roots: tuple[NodeView, ...]
    """Their `words` are empty."""


def take_snapshot(worker: Worker) -> Snapshot:
    """Look at everything; changes nothing."""
    pool = worker.pool
    tables = _tables(worker)
    held = {entry.block: entry.words for table in tables for entry in table.entries}
    blocks = [BlockView(0, pool.state(0), pool.ref_count(0), counter(pool.generation(0)), False, ())]
    for description in worker.manager.describe_blocks(WORKER_ID):
        block = description.block
        node = pool.node(block)
        words = held.get(block, ()) if node is None else worker.words.decode(node.tokens)
        generation = counter(description.generation)
        blocks.append(BlockView(block, description.state, description.ref_count, generation, description.sealed, words))
    return Snapshot(
        BLOCK_SIZE,
        pool.counts(),
        pool.num_evicted,
        tuple(blocks),
        tables,
        tuple(pool.free_list()),
        tuple(_node_view(root, pool, worker.words) for root in _roots(worker)),
    )


def counter(generation: int) -> int:
    """A generation without the epoch of the manager that leads it."""
    return generation & ((1 << EPOCH_SHIFT) - 1)


def _tables(worker: Worker) -> tuple[TableView, ...]:
    tables = []
    for sequence in worker.session.sequences.values():
        words = worker.words.decode(sequence.tokens)
        size, pool = BLOCK_SIZE, worker.pool
        entries = [
            EntryView(block, words[index * size : (index + 1) * size], pool.node(block) is not None)
            for index, block in enumerate(sequence.tables[0])
        ]
        tables.append(
            TableView(
                sequence.key.sequence_id,
                tuple(entries),
                sequence.num_tokens,
                sequence.num_cached_tokens,
                sequence.num_computed_tokens,
            )
        )
    return tuple(tables)


def _roots(worker: Worker) -> list[Node]:
    """Roots of all that is cached or live, in the order of the blocks."""
    pool = worker.pool
    roots: dict[Node, None] = {}
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
