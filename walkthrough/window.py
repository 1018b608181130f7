"""window: layers that see only the last tokens, and what of these is kept for others."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.cache_service.core.block_pool import State

from .layouts import BLOCK_SIZE, FULL_AND_WINDOW, WINDOW
from .recording import Story
from .words import listed
from .worker import Worker

_BEGINNING = "in a deep forest lived an old wise owl who knew"
_A = f"{_BEGINNING} all the birds by name"
_A_GENERATED = "and told them each night what he had seen by day"
_A_NEXT_TURN = f"{_A} {_A_GENERATED} tell me more of the owl"
_B = f"{_BEGINNING} nothing of the sea and asked a gull"
_C = f"{_BEGINNING} only one song"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.session.pools[1]

    a = worker.allocate("A", _A, max_new_tokens=12)
    (boundary,) = a.boundaries
    yield f"""A comes: a table in one group, a ring in the other

    The model has layers that see the whole text, and layers that see its last {WINDOW} tokens only. Each kind is a
    group with a pool of its own. In the first A has a table: a block for each {BLOCK_SIZE} tokens. In the second it is
    granted {len(a.scratch)} scratch blocks, once: a ring, which the worker fills in turn and writes again. No message
    says what is in them, so they have no words here.
    """

    worker.compute("A")
    named = worker.named("A")
    ring = worker.scratch("A")
    yield f"""A's prompt is computed: the window at its end is named

    Others may go on where a prompt ends, so the grant named a boundary: after {boundary} tokens. What a token sees that
    comes next is in blocks {listed(named.values())} of the second group. They were scratch and get their places now,
    {listed(named)}, counted from zero as in the table: sealed, and never written again. What came before has left the
    window and is gone. {len(ring)} scratch blocks are left, which is enough for one token after the other.
    """

    table = worker.table("A")
    worker.compute("A", _A_GENERATED)
    yield f"""A grows: its table does, its ring does not

    {len(_A_GENERATED.split())} tokens more took {len(worker.table("A")) - len(table)} blocks in the first group, out of
    a reserve that the next call fills again, and none in the second: blocks {listed(worker.scratch("A"))} were written
    again. A text of any length is flat there. A has gone on from the named window, so it has released it: blocks
    {listed(named.values())} are cached.
    """

    worker.free("A")
    last = worker.blocks_in(State.CACHED, ring, group=1)
    yield f"""A ends: the window at the end of its text is named too

    A conversation goes on from there. The worker names it by itself, with Free: blocks {listed(last)}. The second group
    has kept {pool.counts().cached} blocks of A, two windows; the first has kept all {worker.pool.counts().cached} that
    were full.
    """

    turn = worker.allocate("A2", _A_NEXT_TURN)
    num_hits = turn.num_cached_tokens // BLOCK_SIZE
    yield f"""A's next turn: {turn.num_cached_tokens} tokens are hits, with {len(turn.named)} blocks in the second group

    A hit of {num_hits} blocks needs all {num_hits} in the first group, and in the second the last {len(turn.named)} of
    them: blocks {listed(turn.named)}. The next token sees no more there. What is new gets scratch, blocks
    {listed(turn.scratch)}.
    """

    worker.free("A2")
    yield f"""It ends: a window that was gone on from is evicted first

    A2 has named the window at its own end, which serves all that the one that it hit could serve. So blocks
    {listed(turn.named)}, which it went on from, are nearer to the head than blocks {listed(named.values())}, which were
    used longer ago. That way chats that take turns keep their last windows, even in a small pool.
    """

    b = worker.allocate("B", _B)
    junction = b.boundaries[0]
    yield f"""B begins as A did, and leaves early: {b.num_cached_tokens} tokens cached

    The first {junction} tokens are in the first group. But no window ends there in the second: when A was computed,
    nobody knew that others would leave it at that point. So B computes everything, and the place where prompts part, a
    junction, is a boundary of B: it has {listed(b.boundaries)}.
    """

    worker.compute("B")
    named = worker.named("B")
    (left,) = worker.scratch("B")
    yield f"""B's prompt is computed: both windows are named

    The one at the junction is released already and cached. The one at the end of the prompt, blocks
    {listed(named.values())}, is B's as long as B may see it. Block {left} is what is left of the ring: all that so
    short a text still needs.
    """

    c = worker.allocate("C", _C)
    yield f"""C leaves at the same place: {c.num_cached_tokens} tokens cached

    Blocks {listed(c.named)} of the second group are the window at the junction. So the third prompt with this beginning
    hits it. Had B come while A was being computed, the second would have: B would have waited, and A would have been
    told to name the place (see the story of the state).
    """


STORY = Story("window", "layers that see only the last tokens", _play, layout=FULL_AND_WINDOW)
