"""Describe and DescribeBlock: a page of a worker's block map, and one block with all that it holds. They change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from .block_pool import BlockPool, State
from .messages import TOKEN_BYTES, Root, SequenceKey
from .prefix_tree import Node, RootNode
from .refusal import bad_field
from .session import Sequence, Session

MAX_BLOCKS_PER_PAGE = 4096
MAX_OWNERS_PER_BLOCK = 16
MAX_OWNER_BLOCKS = 16_384
MAX_FREE_LIST_POSITION = 65_536
"""How far the free list is walked to number its entries; a longer walk would hold up the other calls."""


class BlockDescription(NamedTuple):
    """One block as the manager sees it."""

    block: int
    state: State
    ref_count: int
    generation: int
    token_count: int
    sealed: bool
    block_hash: int
    table_index: int
    owners: tuple[SequenceKey, ...]
    free_list_position: int
    group: int = 0


def _pool_of(session: Session, group: int) -> BlockPool:
    if not 0 <= group < len(session.pools):
        raise bad_field("group", f"worker {session.worker_id!r} has groups 0 to {len(session.pools) - 1}, got {group}")
    return session.pools[group]


def describe_blocks(session: Session, group: int, first_block: int, max_blocks: int) -> list[BlockDescription]:
    """Blocks first_block … of the pool of a group, the null block left out; at most one page of them.

    Raises Refusal: BAD_FIELD.
    """
    pool = _pool_of(session, group)
    begin = max(first_block, 1)
    end = min(pool.num_blocks, begin + min(max_blocks or MAX_BLOCKS_PER_PAGE, MAX_BLOCKS_PER_PAGE))
    owners: dict[int, list[SequenceKey]] = {}
    places: dict[int, tuple[int, int]] = {}
    for sequence in session.sequences.values():
        for index, block in _places(sequence, group):
            if begin <= block < end:
                owners.setdefault(block, []).append(sequence.key)
                count = 0 if index is None else sequence.token_count(index, group)
                places[block] = index or 0, max(count, places.get(block, (0, 0))[1])
    positions: dict[int, int] = {}
    for position, block in enumerate(pool.free_list()):
        if position >= MAX_FREE_LIST_POSITION:
            break
        if begin <= block < end:
            positions[block] = position

    blocks = []
    for block in range(begin, end):
        node = pool.node(block)
        index, count = places.get(block, (0, 0))
        blocks.append(
            BlockDescription(
                block=block,
                state=pool.state(block),
                ref_count=pool.ref_count(block),
                generation=pool.generation(block),
                token_count=count if node is None else session.block_size,
                sealed=node is not None,
                block_hash=0 if node is None else node.block_hash or 0,
                table_index=index if node is None else table_index(session, group, block, node),
                owners=tuple(owners.get(block, ())[:MAX_OWNERS_PER_BLOCK]),
                free_list_position=positions.get(block, -1),
                group=group,
            )
        )
    return blocks


def table_index(session: Session, group: int, block: int, node: Node) -> int:
    """Of a sealed block."""
    if isinstance(node, RootNode):
        return node.units[session.holder].index(block)
    return node.depth


def _places(sequence: Sequence, group: int) -> Iterable[tuple[int | None, int]]:
    """Table index and block of all that a sequence has in a group; None: a scratch block."""
    window = sequence.windows[group] if sequence.windows else None
    if window is None:
        return enumerate(sequence.tables[group])
    return [*window.entries.items(), *((None, block) for block in window.scratch)]


class BlockContent(NamedTuple):
    """One block, and what it holds or is to hold."""

    block: BlockDescription
    """free_list_position: −1."""
    root: Root | None
    """None: it holds nothing, and no sequence is going to fill it."""
    tokens: bytes
    """From position 0 to the end of the block, as far as they are known."""
    prefix_blocks: tuple[int, ...]
    """Of this pool, from table index 0 on, the block last; 0 where none holds that part any more."""
    owner_blocks: tuple[int, ...]
    """The other blocks in the tables of the owners that `block` names, in ascending order; at most MAX_OWNER_BLOCKS."""


def describe_block(session: Session, block: int, group: int = 0) -> BlockContent:
    """One block of the pool of a group. Takes time in proportion to its depth and to the number of live sequences.

    Raises Refusal: BAD_FIELD.
    """
    pool = _pool_of(session, group)
    if not 0 < block < pool.num_blocks:
        raise bad_field("block_id", f"worker {session.worker_id!r} has blocks 1 to {pool.num_blocks - 1}, got {block}")
    node = pool.node(block)
    if node is not None:
        return _sealed(session, pool, block, node)
    if pool.ref_count(block):
        for sequence in session.sequences.values():
            if block in sequence.unsealed(group):
                table = sequence.tables[group]
                if pool is session.unit_pool:
                    return _in_unit(session, pool, block, sequence.root, tuple(table))
                if block not in table:
                    return _scratch(sequence, pool, block)
                return _filling(sequence, pool, block, table.index(block))
    return BlockContent(_one(pool, block, None, 0, 0, ()), None, b"", (), ())


def _sealed(session: Session, pool: BlockPool, block: int, node: Node) -> BlockContent:
    if isinstance(node, RootNode):
        return _in_unit(session, pool, block, node, node.units[session.holder])
    group, depth = pool.slot, node.depth
    owners = [sequence for sequence in session.sequences.values() if sequence.block_at(group, depth) == block]
    pieces, blocks = [node.tokens], [block]
    root = node.parent
    while root is not None and not isinstance(root, RootNode):
        pieces.append(root.tokens)
        blocks.append(pool.copy_of(root))
        root = root.parent
    assert root is not None, "a node is cut off from its root"
    return BlockContent(
        _one(pool, block, node, depth, session.block_size, tuple(owner.key for owner in owners)),
        root.key[0],
        b"".join(reversed(pieces)),
        tuple(reversed(blocks)),
        _others(owners, group, blocks),
    )


def _in_unit(session: Session, pool: BlockPool, block: int, root: Node, unit: tuple[int, ...]) -> BlockContent:
    """Of the KV of an encoder's input, which the manager knows by its digest only."""
    assert isinstance(root, RootNode)
    owners = [one for one in session.sequences.values() if one.root is root and block in one.tables[pool.slot]]
    index, keys = unit.index(block), tuple(owner.key for owner in owners)
    count = max([owner.token_count(index, pool.slot) for owner in owners], default=session.block_size)
    described = _one(pool, block, pool.node(block), index, count, keys)
    return BlockContent(described, root.key[0], b"", unit[: index + 1], _others(owners, pool.slot, unit[: index + 1]))


def _scratch(sequence: Sequence, pool: BlockPool, block: int) -> BlockContent:
    """Only its worker knows what is in it at the moment."""
    assert isinstance(sequence.root, RootNode)
    others = _others([sequence], pool.slot, [block])
    return BlockContent(_one(pool, block, None, 0, 0, (sequence.key,)), sequence.root.key[0], b"", (), others)


def _filling(sequence: Sequence, pool: BlockPool, block: int, index: int) -> BlockContent:
    root, size = sequence.root, sequence.session.block_size
    table = sequence.tables[pool.slot]
    assert isinstance(root, RootNode)
    return BlockContent(
        _one(pool, block, None, index, sequence.token_count(index), (sequence.key,)),
        root.key[0],
        bytes(sequence.tokens[: (index + 1) * size * TOKEN_BYTES]),
        tuple(table[: index + 1]),
        _others([sequence], pool.slot, table[: index + 1]),
    )


def _others(owners: Iterable[Sequence], group: int, blocks: Iterable[int]) -> tuple[int, ...]:
    """Blocks in the tables of the first owners, without these."""
    found: set[int] = set()
    for owner in islice(owners, MAX_OWNERS_PER_BLOCK):
        found.update(islice(owner.blocks(group), MAX_OWNER_BLOCKS))
    return tuple(sorted(found.difference(blocks))[:MAX_OWNER_BLOCKS])


def _one(
    pool: BlockPool, block: int, node: Node | None, index: int, count: int, owners: tuple[SequenceKey, ...]
) -> BlockDescription:
    return BlockDescription(
        block=block,
        state=pool.state(block),
        ref_count=pool.ref_count(block),
        generation=pool.generation(block),
        token_count=count,
        sealed=node is not None,
        block_hash=0 if node is None else node.block_hash or 0,
        table_index=index,
        owners=owners[:MAX_OWNERS_PER_BLOCK],
        free_list_position=-1,
        group=pool.slot,
    )
