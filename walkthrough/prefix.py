"""prefix: a beginning that two chats have in common is computed once."""

from __future__ import annotations

from collections.abc import Iterator

from .layouts import BLOCK_SIZE
from .recording import Story
from .words import listed
from .worker import Worker

_SYSTEM = "you are a kind and clear old poet who likes short lines"
_A = f"{_SYSTEM} tell me of spring"
_B = f"{_SYSTEM} tell me of rain"
_A_NEXT_TURN = f"{_A} buds wake up and sing now tell me more"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool

    a = worker.allocate("A", _A)
    yield f"""Chat A comes: nothing is cached yet

    A's prompt is a system prompt of {len(_SYSTEM.split())} words and a question of
    {len(_A.split()) - len(_SYSTEM.split())}: {len(a.blocks)} blocks. Their KV is not computed yet, so no other sequence
    may use them: round brackets.
    """

    num_sealed = worker.compute("A")
    yield f"""A's prompt is computed: its blocks become hits

    The worker has computed {num_sealed} tokens and says so with Append. That seals the {num_sealed // BLOCK_SIZE}
    blocks: square brackets. A sealed block never changes again, which is why it may be shared.
    """

    b = worker.allocate("B", _B)
    num_hits = b.num_cached_tokens // BLOCK_SIZE
    yield f"""Chat B comes: {num_hits} blocks are reused, {len(b.blocks) - num_hits} is new

    B has the same system prompt: its first {b.num_cached_tokens} tokens are in A's blocks
    {listed(b.blocks[:num_hits])}, which are now in both tables, with ref_count {pool.ref_count(b.blocks[0])}. Only
    whole blocks are shared. B's last one differs in a single word, so B gets block {listed(b.blocks[num_hits:])} for
    it.
    """

    worker.free("A")
    yield f"""A ends: its own block stays cached, the shared ones stay held

    Blocks {listed(b.blocks[:num_hits])} are still B's, with ref_count {pool.ref_count(b.blocks[0])}. Block
    {a.blocks[-1]}, A's question, is in no table any more. It goes to the tail of the free list with its content: the
    free list is the cache.
    """

    worker.free("B")
    yield f"""B ends: everything is cached, nothing is held

    Free also reports what was computed, so block {b.blocks[-1]} is sealed at last. A sequence gives its blocks back
    last block first: nearer to the head means evicted earlier, so the end of a prompt goes before its beginning.
    """

    turn = worker.allocate("A2", _A_NEXT_TURN)
    num_hits = turn.num_cached_tokens // BLOCK_SIZE
    yield f"""Chat A's next turn: hits leave the free list

    A2 is A's prompt, the answer and a new question. All {num_hits} blocks of A are still cached: they leave the free
    list from any place on it, and cannot be evicted now. A hit keeps its generation; only the
    {len(turn.blocks) - num_hits} new blocks were granted.
    """

    repeated = worker.allocate("A3", _A)
    num_hits = repeated.num_cached_tokens // BLOCK_SIZE
    yield f"""A's first prompt again: a full hit still computes one token

    All {len(_A.split())} tokens are cached, yet A3 is given only {repeated.num_cached_tokens}: the next word comes out
    of computing the last one, so at least one token is left to compute. Hits are whole blocks, so the whole last block
    is computed again, in block {listed(repeated.blocks[num_hits:])}, though block {turn.blocks[num_hits]} holds the
    same words.
    """


STORY = Story("prefix", "a beginning that two chats share is computed once", _play)
