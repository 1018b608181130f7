"""sharing: two prompts with one system prompt: the second picture of this project."""

from __future__ import annotations

from collections.abc import Iterator

from .layouts import BLOCK_SIZE
from .recording import Story
from .words import listed
from .worker import Worker

_SYSTEM = "you are a guide of the city museum and you answer shortly"
_A = f"{_SYSTEM} when is it open"
_B = f"{_SYSTEM} when is it closed"


def _play(worker: Worker) -> Iterator[str]:
    pool = worker.pool
    a = worker.allocate("A", _A)
    yield f"""A asks: {len(a.blocks)} misses

    The prompt has {len(_A.split())} tokens: {len(a.blocks)} blocks. Nothing like it is cached, so all of them are
    granted anew and must be computed. A's table is {list(a.blocks)}.
    """
    num_sealed = worker.compute("A")
    yield f"""A's blocks are stored under what they hold

    {num_sealed} tokens are computed, and {num_sealed // BLOCK_SIZE} full blocks are in the prefix tree: each under its
    tokens and everything before them. The same words after another beginning would be another block.
    """
    b = worker.allocate("B", _B)
    num_hits = b.num_cached_tokens // BLOCK_SIZE
    yield f"""B asks, and only the last word differs: {num_hits} hits, {len(b.blocks) - num_hits} miss

    The look-up goes block by block: {listed(b.blocks[:num_hits])} are there, each after the one before it; the last one
    is not, and block {listed(b.blocks[num_hits:])} is granted for it. B's table is {list(b.blocks)}; the shared blocks
    have a count of {pool.ref_count(b.blocks[0])}.
    """
    worker.compute("B")
    yield f"""Only B's last {BLOCK_SIZE} tokens are computed

    {b.num_cached_tokens} of B's {len(_B.split())} tokens were not computed again. {num_hits} of {len(b.blocks)} blocks
    are stored once and computed once, for both.
    """
    worker.free("A", "B")
    yield f"""Both end, and the next one finds all of it

    No table names the blocks any more, and {pool.counts().cached} of them stay cached. The next question to the same
    guide begins with {num_hits} hits.
    """


STORY = Story("sharing", "two prompts share all blocks but their last", _play)
