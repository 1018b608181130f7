"""Describe: a page of a worker's block map. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from .block_pool import State
from .messages import SequenceKey
from .session import Session

MAX_BLOCKS_PER_PAGE = 4096
MAX_OWNERS_PER_BLOCK = 16
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


def describe_blocks(session: Session, first_block: int, max_blocks: int) -> list[BlockDescription]:
    """Blocks first_block … of the session's pool, the null block left out; at most one page of them."""
    pool = session.pool
    begin = max(first_block, 1)
    end = min(pool.num_blocks, begin + min(max_blocks or MAX_BLOCKS_PER_PAGE, MAX_BLOCKS_PER_PAGE))
    owners: dict[int, list[SequenceKey]] = {}
    places: dict[int, tuple[int, int]] = {}
    for sequence in session.sequences.values():
        for index, block in enumerate(sequence.table):
            if begin <= block < end:
                owners.setdefault(block, []).append(sequence.key)
                count = sequence.token_count(index)
                places[block] = index, max(count, places.get(block, (0, 0))[1])
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
                token_count=count if node is None else pool.block_size,
                sealed=node is not None,
                block_hash=0 if node is None else node.block_hash or 0,
                table_index=index if node is None else node.depth,
                owners=tuple(owners.get(block, ())[:MAX_OWNERS_PER_BLOCK]),
                free_list_position=positions.get(block, -1),
            )
        )
    return blocks
