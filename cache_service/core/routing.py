"""Route: which workers have the least to compute for a prompt. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

from .copies import Holder
from .hashing import HashFunction
from .messages import TOKEN_BYTES, Root, WorkerLoad
from .prefix_tree import Node, PrefixTree
from .session import Session

SEQUENCE_COST_TOKENS = 16
"""Cost of a sequence on a worker for a new one, in tokens of prefill: large enough to spread equal prompts over idle workers before
a short prefix draws them all to one."""


class RoutedWorker(NamedTuple):
    """A worker that can serve the prompt, and how much of it it has."""

    session: Session
    num_cached_tokens: int
    num_in_flight_tokens: int
    """Prefix that it holds or is computing; at least num_cached_tokens."""
    load: WorkerLoad


def reach(
    path: list[Node], holders_of: Callable[[Node], Iterable[Holder]], signature_of: Callable[[Node], object]
) -> dict[Holder, int]:
    """How many leading nodes of the path each holder has, for the holders of the first node.

    All workers have a common prefix, node after node. So a node costs one comparison of signatures where it has the same holders as
    the node before.
    """
    reached: dict[Holder, int] = {}
    if not path:
        return reached
    remaining, signature = set(holders_of(path[0])), signature_of(path[0])
    for index, node in enumerate(path):
        here = signature_of(node)
        if here == signature:
            continue
        signature = here
        left = remaining.intersection(holders_of(node))
        reached.update(dict.fromkeys(remaining - left, index))
        remaining = left
        if not remaining:
            return reached
    reached.update(dict.fromkeys(remaining, len(path)))
    return reached


def cached_along(path: list[Node]) -> dict[Holder, int]:
    """How many leading nodes of the path look-ups find, by holder; for those that find any."""
    return reach(path, Node.complete_holders, Node.copies_signature)


def _holders_or_leaders(node: Node) -> set[Holder]:
    return {*node.complete_holders(), *node.leading_holders()}


def _signature(node: Node) -> tuple[int, int]:
    return node.copies_signature(), node.leaders_signature()


_ORDER = itemgetter(0, 1)
"""Of (cost, tie, session): sessions have none."""


class _Prompt(NamedTuple):
    """What a prompt means to workers of one block size."""

    cached: dict[Holder, int]
    in_flight: dict[Holder, int]
    first_block: bytes


def _look_up(tree: PrefixTree, root: Root, tokens: bytes, block_size: int) -> _Prompt:
    node = tree.find_root(root, block_size)
    max_blocks = (len(tokens) // TOKEN_BYTES - 1) // block_size
    path = [] if node is None else tree.match(node, tokens, block_size, max_blocks)
    cached = cached_along(path)
    in_flight = reach(path, _holders_or_leaders, _signature)
    return _Prompt(cached, in_flight, b"\0" + tokens[: block_size * TOKEN_BYTES])


def route(
    tree: PrefixTree,
    sessions: Iterable[Session],
    root: Root,
    tokens: bytes,
    hash_function: HashFunction,
    max_workers: int = 0,
) -> list[RoutedWorker]:
    """The sessions, best first: least expected work (tokens to compute + work queued), cold ties by hash of the first block. At
    most `max_workers`, if that is not 0.

    The hash is combined with the worker's id (rendezvous hashing), so that equal cold prompts meet on one worker and different
    ones spread.
    """
    num_tokens = len(tokens) // TOKEN_BYTES
    prompts: dict[int, _Prompt] = {}
    ranked: list[tuple[int, int, Session]] = []
    for session in sessions:
        block_size, load = session.block_size, session.load
        prompt = prompts.get(block_size)
        if prompt is None:
            prompt = prompts[block_size] = _look_up(tree, root, tokens, block_size)
        num_computed = prompt.in_flight.get(session.holder, 0) * block_size
        num_running = len(session.sequences)
        if load.num_running > num_running:
            num_running = load.num_running
        cost = num_tokens - num_computed + load.num_uncomputed_tokens
        cost += SEQUENCE_COST_TOKENS * (num_running + load.num_waiting)
        ranked.append((cost, hash_function(session.name + prompt.first_block), session))
    ranked.sort(key=_ORDER)
    routed = []
    for _, _, session in ranked[:max_workers] if max_workers else ranked:
        prompt, block_size = prompts[session.block_size], session.block_size
        num_cached = prompt.cached.get(session.holder, 0) * block_size
        num_in_flight = prompt.in_flight.get(session.holder, 0) * block_size
        routed.append(RoutedWorker(session, num_cached, num_in_flight, session.load))
    return routed
