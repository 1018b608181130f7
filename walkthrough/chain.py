"""chain: the same words after two parents are two blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvpool.cache_service.core.prefix_tree import Node

from .recording import Story
from .words import listed
from .worker import Worker

_RIVER = "we row to the"
_MONEY = "I pay at the"
_SAME = "bank and sit down"
_A = f"{_RIVER} {_SAME} now"
_B = f"{_MONEY} {_SAME} now"
_C = f"{_RIVER} {_SAME} again"
_D = f"{_MONEY} {_SAME} again"
_E = f"{_SAME} now"


def _play(worker: Worker) -> Iterator[str]:
    a = worker.allocate("A", _A)
    yield f"""A comes: a chain of blocks from the root

    The prefix tree has a node for each block of words after a prefix. A's {len(a.blocks) - 1} full blocks are known and
    A is computing them; none has a name yet. The root says what else KV depends on: the model, the adapter, the tenant,
    the block size.
    """

    worker.compute("A")
    first, second = _nodes(worker, "A")
    yield f"""A's blocks are sealed and get their names

    block_hash = xxh64(parent's block_hash ‖ tokens). So {_name(second)} names not only “{_SAME}”, but that after
    {_name(first)}, which is “{_RIVER}” after the root: a name covers everything before it.
    """

    b = worker.allocate("B", _B)
    yield f"""B has the same four words after another parent: {b.num_cached_tokens} tokens cached

    Block {a.blocks[1]} holds the very words “{_SAME}”. But its KV was computed while attention looked back at
    “{_RIVER}”: it is about the bank of a river. A cache that compared only the block's own tokens would splice this KV
    into a sentence about money, and B would get a wrong answer without any error. So it is no hit.
    """

    worker.compute("B")
    other = _nodes(worker, "B")[1]
    yield f"""The same words, two nodes, two names

    “{_SAME}” is {_name(second)} after “{_RIVER}” and {_name(other)} after “{_MONEY}”. The name is for people and
    events. The tree itself decides a hit: a node is found by its parent and its exact tokens, so no hash has to be
    trusted.
    """

    worker.free("A", "B")
    yield f"""A and B end: both chains stay cached

    Blocks {listed((*a.blocks[:2], *b.blocks[:2]))} are on the free list and still in the tree. The last word of each,
    “now”, did not fill a block: it has no node, and its block is free.
    """

    c = worker.allocate("C", _C)
    yield f"""C has A's parent: {c.num_cached_tokens} tokens cached

    “{_RIVER}” and then “{_SAME}” is the path that A computed, so C gets A's blocks {listed(c.blocks[:2])}. The other
    “{_SAME}”, block {b.blocks[1]}, stays where it is.
    """

    d = worker.allocate("D", _D)
    yield f"""D has B's parent: {d.num_cached_tokens} tokens cached

    The same words after the same parent are a hit again: D gets B's blocks {listed(d.blocks[:2])}. C and D hold the
    same four words in two blocks, and each continues its own sentence.
    """

    e = worker.allocate("E", _E)
    yield f"""E begins with the four words: {e.num_cached_tokens} tokens cached

    Here “{_SAME}” follows the root itself: a third parent, so a third node. Nothing is cached on that path; E computes
    block {e.blocks[0]} itself. The same words in three places are three different pieces of KV.
    """


def _nodes(worker: Worker, name: str) -> tuple[Node, Node]:
    first, second = worker.session.sequences[name, 1].nodes
    return first, second


def _name(node: Node) -> str:
    return "no name" if node.block_hash is None else f"{node.block_hash:016x}"


STORY = Story("chain", "the same words after two parents are two different blocks", _play, shows_tree=True)
