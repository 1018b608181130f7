"""eviction: the least recently used goes first, the end of a prefix before its beginning."""

from __future__ import annotations

from collections.abc import Iterator

from .layouts import BLOCK_SIZE
from .recording import Story
from .words import listed
from .worker import Worker

_A = "once upon a time there was a fox who lived in a deep and dark wood"
_B = "far away at sea sails a small boat with a big cat and a tiny mouse"
_C = "on top of a hill stands an old tower and in it lives a wise owl"
_D = "down by the lake a frog began to sing a long song about the moon and all the stars that shine"
_E = "once upon a time there was a fox who met a bear in the snow"
_F = "in the big city a young girl had a kite"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool

    a, b, c = worker.allocate_all({"A": _A, "B": _B, "C": _C})
    yield f"""A, B and C come: most of the pool is held

    Three prompts of {len(a.blocks)} blocks each, allocated in one call. {pool.counts().free} blocks are free. Watch the
    free list: its head, on the left, is granted next.
    """

    worker.free("A")
    yield f"""A ends: its blocks go to the tail, the last one first

    All {len(a.blocks)} blocks of A are sealed and stay cached, after the blocks that hold nothing. A's last block,
    {a.blocks[-1]}, is before its first, {a.blocks[0]}: it is evicted earlier, because an end is no hit without its
    beginning, but a beginning is a hit without its end.
    """

    worker.free("B")
    yield f"""B ends: used later, evicted later

    B's blocks go after A's. The free list is now the cache in the order of its last use: {pool.counts().cached} cached
    blocks, the least recently used nearest to the head.
    """

    d = worker.allocate("D", _D)
    evicted = [block for block in d.blocks if block in a.blocks]
    next_in_line = list(pool.free_list())[:2]
    yield f"""D needs {len(d.blocks)} blocks: pressure

    {len(d.blocks) - len(evicted)} blocks were free; then cached ones are evicted from the head: {listed(evicted)}, the
    end of A. What they held is forgotten, and they get a new generation. A's beginning, {listed(next_in_line)}, is next
    in line.
    """

    e = worker.allocate("E", _E)
    num_hits = e.num_cached_tokens // BLOCK_SIZE
    fresh = e.blocks[num_hits:]
    yield f"""E begins as A did: saved in time

    Blocks {listed(e.blocks[:num_hits])} were at the head of the list and would have been evicted next. Hits are taken
    off the list before anything is granted, so E reuses {e.num_cached_tokens} tokens. Its {len(fresh)} new blocks evict
    {listed(fresh)} instead, the end of B.
    """

    worker.allocate_in_vain("F", _F)
    counts = pool.counts()
    yield f"""F asks for too much: nothing happens at all

    F needs {-(-len(_F.split()) // BLOCK_SIZE)} blocks, and only {counts.free + counts.cached} are left:
    {listed(pool.free_list())}, B's beginning. An allocation happens whole or not at all, so nothing was evicted for
    nothing: B's beginning is still a hit, and the worker asks again when something has ended.
    """

    worker.free("C")
    yield f"""C ends: there is room again

    C's {len(c.blocks)} blocks become cached, after B's. {pool.num_available} blocks can be granted now, though not one
    of them is empty: a full pool is not an exhausted one.
    """

    f = worker.allocate("F", _F)
    of_b = [block for block in f.blocks if block in b.blocks]
    of_c = [block for block in f.blocks if block in c.blocks]
    still_cached = list(pool.free_list())
    yield f"""F is asked for again: granted

    F evicts B's beginning, {listed(of_b)}, and block {listed(of_c)}, the end of C. C's first {len(still_cached)} blocks
    are still cached: a request that begins as C did saves {len(still_cached) * BLOCK_SIZE} tokens. In all,
    {pool.num_evicted} blocks were evicted, none of them while in use.
    """


STORY = Story("eviction", "under pressure: least recently used first, ends before beginnings", _play)
