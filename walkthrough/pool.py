"""pool: sixteen blocks, from all free to shared: the first picture of this project."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.cache_service.core.block_pool import State

from .layouts import BLOCK_SIZE
from .recording import Story
from .words import listed
from .worker import Worker

_A = "once there was a small house at the edge of town"
_A_GENERATED = "where an old"
_B = "add one to two now"
_C = "once there was a big ship far out at sea"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool
    yield f"""All blocks are free

    The worker's memory is cut into {pool.capacity} blocks of {BLOCK_SIZE} tokens, like the places of an empty car park.
    Which block is next is said by the free list alone: no search, whatever the size of the pool.
    """
    a = worker.allocate("A", _A, max_new_tokens=3)
    (reserved,) = worker.blocks_in(State.RESERVED)
    yield f"""A comes and gets {len(a.blocks)} blocks

    {len(_A.split())} tokens fill two blocks and a part of a third. They need not be next to each other: the block table
    says where each is. Block {reserved} is the worker's reserve: granted, and in no table yet.
    """
    b = worker.allocate("B", _B)
    yield f"""B comes and gets {len(b.blocks)}

    Blocks {listed(b.blocks)}. Nothing was copied or moved for it, and the most that a sequence wastes is the end of its
    last block.
    """
    worker.compute("A", _A_GENERATED)
    (grown,) = set(worker.table("A")) - set(a.blocks)
    yield f"""A grows by one block

    Its answer has filled block {a.blocks[-1]}, so block {grown}, out of the reserve, is the next entry of its table.
    Append reports whole blocks: those are computed and sealed now, never change from here on, and others may use them.
    What A has in block {grown} is reported when that is full, or when A ends.
    """
    worker.free("B")
    (emptied,) = worker.blocks_in(State.FREE, b.blocks)
    (cached,) = worker.blocks_in(State.CACHED, b.blocks)
    yield f"""B ends and gives its blocks back

    Block {emptied} was not full: it is empty again and lies at the head of the free list. Block {cached} was full: it
    goes to the tail, keeps what it holds, and is a hit for the next prompt that begins so, until its place is needed.
    """
    c = worker.allocate("C", _C)
    yield f"""C comes: one block is shared, one is used again

    C begins as A does, so block {c.blocks[0]} is in both tables, with a count of {pool.ref_count(c.blocks[0])}. For the
    rest C takes what the free list has first: block {c.blocks[1]}, which was B's, and then one that was never used.
    """
    table = worker.table("A")
    worker.free("A")
    (shared,) = worker.blocks_in(State.HELD, table)
    yield f"""A ends: the shared block stays

    Every block of A loses one from its count. Block {shared} is still C's, so it stays held; the others are cached or
    free. A block is given back when the last table that names it has gone.
    """


STORY = Story("pool", "sixteen blocks, from all free to shared", _play)
