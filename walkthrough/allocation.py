"""allocation: requests come, grow, share and go."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.cache_service.core.block_pool import State

from .layouts import BLOCK_SIZE
from .recording import Story
from .snapshot import counter
from .words import listed
from .worker import Worker

_A = "the cat sat on the mat and slept so long"
_A_GENERATED = "that he forgot it"
_B = "my dog ran to the big tree"
_C = "the cat sat on the mat and slept next to me"
_D = "two birds sing a loud song to the sun"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool

    a = worker.allocate("A", _A, max_new_tokens=4)
    num_tokens, reserved = len(_A.split()), worker.blocks_in(State.RESERVED)
    yield f"""A comes: a prompt gets as many blocks as it fills

    {num_tokens} tokens need {len(a.blocks)} blocks of {BLOCK_SIZE}, taken from the head of the free list; the
    {len(a.blocks) * BLOCK_SIZE - num_tokens} empty slots in the last one are all that is wasted. Block 0 is the null
    block: it is never granted, so the worker can use it as padding, and no KV is ever there. The call also asks for a
    reserve, which is filled first: block {listed(reserved)} now belongs to the worker, but to no sequence yet.
    """

    b = worker.allocate("B", _B, max_new_tokens=4)
    reserved = worker.blocks_in(State.RESERVED)
    yield f"""B comes: the reserve has a block for each sequence that may grow

    The reserve is blocks {listed(reserved)} now. A decode that needs one more block will take it from there and wait
    for no call. B's own table is blocks {listed(b.blocks)}.
    """

    num_sealed = worker.compute("A", _A_GENERATED)
    (from_reserve,) = set(worker.table("A")) - set(a.blocks)
    yield f"""A grows: its next block comes out of the reserve

    A generated {len(_A_GENERATED.split())} words: they filled its last block and began block {from_reserve}, out of the
    reserve. Append states this to the manager while the next step runs; that step computes the KV of the newest word.
    The call also seals {num_sealed // BLOCK_SIZE} full and computed blocks, which never change again and are hits for
    others from now on. The words of block {from_reserve} are not reported before it is full.
    """

    c = worker.allocate("C", _C)
    num_shared = c.num_cached_tokens // BLOCK_SIZE
    yield f"""C begins as A does: the same blocks, in two tables

    C's first {c.num_cached_tokens} tokens are A's, so C's table begins with A's blocks {listed(c.blocks[:num_shared])}:
    nothing is computed again and nothing is copied, only their ref_count rises to {pool.ref_count(c.blocks[0])}. From
    the first block that differs on, C has blocks of its own.
    """

    worker.free("B")
    (cached,), (emptied,) = worker.blocks_in(State.CACHED, b.blocks), worker.blocks_in(State.FREE, b.blocks)
    (returned,) = worker.blocks_in(State.FREE, reserved)
    yield f"""B goes: what is sealed stays cached, what is not is emptied

    Block {cached} was full and computed: it is sealed, goes to the tail of the free list and stays cached for the next
    request with these words. Block {emptied} was not full, so it can never be a hit: it goes to the head and is granted
    next. No sequence is left that may grow, so block {returned} of the reserve goes back too.
    """

    d = worker.allocate("D", _D)
    generation = counter(pool.generation(d.blocks[0]))
    yield f"""D comes: the head of the free list is granted first

    D takes block {d.blocks[0]}, which B has just emptied, block {d.blocks[1]}, which has come back, and then one that
    was never used; B's cached block {cached} still waits at the tail. g is the generation, the stamp of the call that
    granted a block: that of block {d.blocks[0]} is {generation} now, so a late message about its earlier use is not
    taken for a new one.
    """

    table = worker.table("A")
    worker.free("A")
    (shared, (cached,), (emptied,)) = (
        worker.blocks_in(state, table) for state in (State.HELD, State.CACHED, State.FREE)
    )
    yield f"""A goes: what it shared lives on

    Each of A's blocks loses one reference. Blocks {listed(shared)} are still in C's table, so they stay held, with
    ref_count {pool.ref_count(shared[0])}. Block {cached} is in no table any more and is cached; block {emptied} was
    never full and is free. In all this no block was copied or moved.
    """


STORY = Story("allocation", "requests come, grow, share and go", _play)
