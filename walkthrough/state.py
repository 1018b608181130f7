"""state: layers that keep one state of a text, and snapshots of it."""

from __future__ import annotations

from collections.abc import Iterator

from .layouts import BLOCK_SIZE, FULL_AND_STATE, GRID_TOKENS
from .recording import Story
from .words import listed
from .worker import Worker

_SYSTEM = "you are a calm captain and you answer in rhymes"
_A = f"{_SYSTEM} how do we sail home when the wind is against us"
_B = f"{_SYSTEM} why is the sea salty"
_C = f"{_A} and the night is dark"
_D = f"{_SYSTEM} who is at the wheel"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.session.pools[1]

    a = worker.allocate("A", _A)
    (boundary,) = a.boundaries
    yield f"""A comes: a table in one group, one state in the other

    A recurrent layer keeps one state of a text, whatever its length, and every token overwrites it. So A has
    {len(a.blocks)} blocks in the first group, whose layers attend, and {len(a.scratch)} in the second: its running
    state, and a place for a copy. A copy that is named is a snapshot, and others can go on from it. Snapshots are taken
    after multiples of {GRID_TOKENS} tokens, the grid; the last one before A's last token is after {boundary}.
    """

    position = worker.allocate_too_early("B", _B)
    yield f"""B begins as A does: it waits, and A is told

    The two part after {len(_SYSTEM.split())} tokens. Down to the grid that is {position}, where A has not been yet. So
    B is granted nothing and waits, and the answer carries an order for A on the downlink: keep the state after
    {position} tokens. If A were past that place it would be too late, because the state that was there is overwritten.
    """

    worker.compute("A", up_to=position)
    ((index, snapshot),) = worker.named("A").items()
    yield f"""A has computed {position} tokens: the copy becomes a snapshot

    A's step ended there, so its copy, block {snapshot}, is the state after {position} tokens. It gets a place, {index}:
    that of the last block of tokens in it, counted from zero. The next copy needs another block, so the call asks for
    one in the reserve. The running state itself is never named, so nobody shares it.
    """

    b = worker.allocate("B", _B)
    num_hits = b.num_cached_tokens // BLOCK_SIZE
    yield f"""B is asked for again: {b.num_cached_tokens} tokens cached

    A hit of {num_hits} blocks needs {num_hits} in the first group, and in the second one snapshot, at its end: block
    {listed(b.named)}, however long the prefix is. So the second prompt with this beginning has a hit, not only the
    third. B's running state is one of its own scratch blocks, {listed(b.scratch)}: its first step reads the snapshot
    and writes there, so the snapshot stays as it is.
    """

    worker.compute("A")
    (last,) = worker.named("A").values()
    yield f"""A's prompt is computed: one more snapshot, and the first is released

    Block {last} is the state after {boundary} tokens, A's until a step has gone on from it. From block {snapshot} A has
    gone on, so it has released it; it is still B's, which may not have read it yet. A's text ends before the next place
    of the grid, so the reserve goes back.
    """

    worker.free("A", "B")
    num_kept = pool.counts().cached
    yield f"""Both end: {num_kept} states are left, and {worker.pool.counts().cached} blocks

    In the first group every full block is a hit for others. In the second there is no state but at {num_kept} places: a
    real one is as large as the keys and values of hundreds of tokens, so one for each block would fill the memory.
    """

    num_full = len(_A.split()) // BLOCK_SIZE * BLOCK_SIZE
    c = worker.allocate("C", _C)
    yield f"""C goes on from A's prompt: {c.num_cached_tokens} tokens cached

    The first group has {num_full} tokens of it, but there is no state after {num_full}. The last snapshot on the way is
    that after {c.num_cached_tokens}, block {listed(c.named)}: C computes the rest again.
    """

    d = worker.allocate("D", _D)
    yield f"""D has only the beginning of A: {d.num_cached_tokens} tokens cached

    A state cannot be cut: that after {c.num_cached_tokens} tokens has seen what D does not say. D gets block
    {listed(d.named)}, the snapshot that was taken because B parted from A there. A client knows where its system prompt
    ends, and can ask for a snapshot there before anybody parts.
    """


STORY = Story("state", "layers that keep one state of a text, and snapshots of it", _play, layout=FULL_AND_STATE)
