"""Describe and DescribeBlock: a page of a worker's block map, and one block with all that it holds. They change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from .block_pool import BlockPool, State
from .groups.group import SessionGroup
from .messages import TOKEN_BYTES, Root, SequenceKey
from .prefix_tree import Node, RootNode
from .refusal import bad_field
from .sequence import Sequence
from .session import Session

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


def _group_of(session: Session, group: int) -> SessionGroup:
    if not 0 <= group < len(session.by_slot):
        raise bad_field("group", f"worker {session.worker_id!r} has groups 0 to {len(session.pools) - 1}, got {group}")
    return session.by_slot[group]


def describe_blocks(session: Session, group: int, first_block: int, max_blocks: int) -> list[BlockDescription]:
    """Blocks first_block … of the pool of a group, the null block left out; at most one page of them.

    Raises Refusal: BAD_FIELD.
    """
    of = _group_of(session, group)
    pool = of.pool
    begin = max(first_block, 1)
    end = min(pool.num_blocks, begin + min(max_blocks or MAX_BLOCKS_PER_PAGE, MAX_BLOCKS_PER_PAGE))
    owners: dict[int, list[SequenceKey]] = {}
    places: dict[int, tuple[int, int]] = {}
    for sequence in session.sequences.values():
        for index, block in of.places(sequence):
            if begin <= block < end:
                owners.setdefault(block, []).append(sequence.key)
                count = 0 if index is None else of.token_count(sequence, index)
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
        if node is not None:
            index, count = of.table_index(block, node), session.block_size
        keys = tuple(owners.get(block, ()))
        blocks.append(_one(pool, block, node, index, count, keys)._replace(free_list_position=positions.get(block, -1)))
    return blocks


class BlockContent(NamedTuple):
    """One block, and what it holds or is to hold."""

    block: BlockDescription
    """free_list_position: −1."""
    root: Root | None
    """None: it holds nothing, and no sequence is going to fill it."""
    tokens: bytes
    """The known tokens from position 0 to the end of the block."""
    prefix_blocks: tuple[int, ...]
    """Blocks of the same pool from table index 0 on, ending with this block; 0 for a part that no block holds any more."""
    owner_blocks: tuple[int, ...]
    """The other blocks in the tables of the owners that `block` names, in ascending order; at most MAX_OWNER_BLOCKS."""


def describe_block(session: Session, block: int, group: int = 0) -> BlockContent:
    """One block of the pool of a group. Takes time in proportion to its depth and to the number of live sequences.

    Raises Refusal: BAD_FIELD.
    """
    of = _group_of(session, group)
    pool = of.pool
    if not 0 < block < pool.num_blocks:
        raise bad_field("block_id", f"worker {session.worker_id!r} has blocks 1 to {pool.num_blocks - 1}, got {block}")
    node = pool.node(block)
    owners: list[Sequence] = []
    index: int | None = None
    count, tokens, blocks, root = 0, b"", [block], node
    if node is not None:
        index, count, blocks = of.table_index(block, node), session.block_size, of.prefix(block, node)
        owners = [one for one in session.sequences.values() if of.block_at(one, index) == block]
        pieces: list[bytes] = []
        while root is not None and not isinstance(root, RootNode):
            pieces.append(root.tokens)
            root = root.parent
        assert root is not None, "a node is cut off from its root"
        tokens = b"".join(reversed(pieces))
    elif pool.ref_count(block):
        owners = [one for one in session.sequences.values() if block in of.unsealed(one)]
        root = owners[0].root
        index = next(index for index, one in of.places(owners[0]) if one == block)
        if index is not None:  # else only its worker knows what is in it at the moment
            count = max(of.token_count(owner, index) for owner in owners)
            blocks = [one for place, one in of.places(owners[0]) if place is not None and place <= index]
            if of.is_whole:
                tokens = bytes(owners[0].tokens[: (index + 1) * session.block_size * TOKEN_BYTES])
    return BlockContent(
        _one(pool, block, node, index or 0, count, tuple(owner.key for owner in owners)),
        root.key[0] if isinstance(root, RootNode) else None,
        tokens,
        () if index is None else tuple(blocks),
        _others(of, owners, blocks),
    )


def _others(group: SessionGroup, owners: Iterable[Sequence], blocks: Iterable[int]) -> tuple[int, ...]:
    """Blocks in the tables of the first owners, without these."""
    found: set[int] = set()
    for owner in islice(owners, MAX_OWNERS_PER_BLOCK):
        found.update(islice(group.blocks(owner), MAX_OWNER_BLOCKS))
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
