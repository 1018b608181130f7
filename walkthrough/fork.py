"""fork: several answers to one prompt, which is computed and kept once."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.cache_service.core.block_pool import State

from .layouts import BLOCK_SIZE
from .recording import Story
from .words import listed
from .worker import Worker

_A = "write me a short poem on the first snow"
_A_FIRST, _A_GENERATED = "white", "and still it lies on every warm roof"
_B_FIRST, _B_GENERATED = "soft", "as sleep it falls and falls"
_C_FIRST = "drifts"
_D = f"{_A} {_B_FIRST} {_B_GENERATED} now one on rain"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool
    num_tokens = len(_A.split())

    a = worker.allocate("A", _A, max_new_tokens=12, num_forks=1)
    yield f"""A comes: one prompt, to which several answers are wanted

    {num_tokens} tokens need {len(a.blocks)} blocks. The worker also holds a reserve, because whatever the answers need
    later must not wait for a call.
    """

    num_sealed = worker.compute("A", _A_FIRST)
    num_full = num_sealed // BLOCK_SIZE
    yield f"""A's prompt is computed, once, and its first word is drawn

    {num_full} blocks are full: sealed, they never change again. Block {a.blocks[num_full]} holds the rest of the
    prompt, and its next slot is for “{_A_FIRST}”, whose KV the next step computes. Here the answers part.
    """

    worker.fork("A", "B", _B_FIRST)
    b = worker.table("B")
    yield f"""B is a fork of A: full blocks are shared, the tail is copied

    B has drawn “{_B_FIRST}”. Blocks {listed(b[:num_full])} are in both tables now, with ref_count
    {pool.ref_count(b[0])}. Block {a.blocks[num_full]} cannot be shared, because both go on to write in it: the next
    step copies it on the device into block {b[num_full]}, out of the reserve. The worker made B between two steps and
    asked nobody; Fork states it afterwards. The answer grants nothing that B would have had to wait for.
    """

    worker.compute("A", _A_GENERATED)
    yield f"""A goes on: what it fills is its own

    A's table is {worker.table("A")}: its tail is full and sealed, under A's words. B's table and block {b[num_full]}
    are as they were.
    """

    worker.compute("B", _B_GENERATED)
    b = worker.table("B")
    yield f"""B goes on too: the same prefix, another block

    Block {b[num_full]} is full now. It begins with the same word of the prompt as A's block {a.blocks[num_full]}, and
    they hold two continuations: two nodes after one parent.
    """

    worker.fork("B", "C", _C_FIRST)
    c = worker.table("C")
    num_shared = len(set(b) & set(c))
    yield f"""C is a fork of B: a fork of a fork

    A beam search does this in every step: the better of two continuations goes on twice, the other one not at all. C
    shares {num_shared} blocks with B, its tail is copied into block {c[num_shared]}, and only its last word is another
    one, “{_C_FIRST}”. The ref_counts of the prompt's blocks are {pool.ref_count(c[0])}.
    """

    table = worker.table("A")
    worker.free("A")
    emptied = worker.blocks_in(State.FREE, table)
    yield f"""A ends first: nobody needs the parent any more

    The blocks that A shared lose one reference each, and stay: ref_count {pool.ref_count(c[0])}. Its own full blocks,
    {listed(worker.blocks_in(State.CACHED, table))}, are cached, and its tail, {listed(emptied)}, is empty. The one rule
    is that the worker states the Forks of A before it frees A: until then the manager takes the shared blocks for A's
    alone, and would grant them to others.
    """

    worker.free("B", "C")
    yield f"""B and C end: each block is kept once

    {pool.counts().cached} full blocks of three answers are cached, the prompt's {num_full} among them. With a copy of
    the prompt for each answer it would be {pool.counts().cached + 2 * num_full}.
    """

    d = worker.allocate("D", _D)
    num_hits = d.num_cached_tokens // BLOCK_SIZE
    yield f"""D goes on from B's answer: {d.num_cached_tokens} tokens cached

    Blocks {listed(d.blocks[:num_hits])}: a fork's blocks are hits like all others. How they came to be shared is
    forgotten; the tree has only what they hold.
    """


STORY = Story("fork", "several answers to one prompt, which is kept once", _play)
